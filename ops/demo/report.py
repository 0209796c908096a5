"""All numbers of the demo's final report, as plain values. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ops.demo.audit import AuditReport, LogEvent, LogEventKind
from ops.demo.cast import CastTenant
from ops.demo.forms import is_promised
from ops.demo.replay import Sent
from ops.demo.shares import FluidIdeal, TenantArrival, ideal_shares, under_share
from ops.demo.trace import ReplayPlan
from ops.reporting import jain_index, plain, quantile
from ops.sandbox.core_use import TOO_BUSY
from ops.simulate.figures.figures import covered, within_factor

WAIT_FLOOR_S = 0.1
"""Waits below this count as this: an estimate of 20 ms for a wait of 50 ms is right."""
MIN_BACKLOG_S = 60.0
MIN_FAIR_COST = 1000.0
"""A fair share below this is a handful of requests: one more or less says nothing about fairness."""


@dataclass(frozen=True)
class Sample:
    """Service so far by tenant, in cost tokens, at one instant of the replay's clock."""

    at_s: float
    service: Mapping[str, float]


@dataclass
class DemoEvidence:
    """Records of the run. Tenants are named as in the trace; times are on the replay's clock."""

    cast: Sequence[CastTenant]
    replay: ReplayPlan
    sent: Sequence[Sent]
    samples: Sequence[Sample]
    events: Sequence[LogEvent]
    audit: AuditReport
    ledger: Mapping[str, Any]
    capacity: Mapping[str, float]
    engine: Mapping[str, Any]
    turns: Mapping[str, Any]
    forms: Mapping[str, Any]
    duration_s: float
    waited_for_a_core: float | None = None
    """Share of the engine's time that it waited for a core, in its worst seconds; None: unknown."""
    simulated_waits_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    simulated_duration_s: Mapping[str, float] = field(default_factory=dict)
    """By policy: when the last answer ended; compared with `duration_s` it shows the simulation's error."""
    cut: int = 0
    """Requests that were cut because the machine fell far behind its calibration."""
    bound_after: Mapping[str, int] = field(default_factory=dict)
    """By tier: its answers until its quotes were binding."""


def queue_waits_s(events: Sequence[LogEvent]) -> dict[str, float]:
    arrived = {event.request_id: event.at_s for event in events if event.happened is LogEventKind.ARRIVED}
    return {
        event.request_id: event.at_s - arrived[event.request_id]
        for event in events
        if event.happened is LogEventKind.DISPATCHED
    }


def ideal_by_tier(
    cast: Sequence[CastTenant], arrivals: Sequence[TenantArrival], samples: Sequence[Sample]
) -> dict[str, FluidIdeal]:
    ideals = {}
    for tier in sorted({tenant.tier.value for tenant in cast}):
        names = {tenant.name: tenant.weight for tenant in cast if tenant.tier.value == tier}
        served = [(sample.at_s, sum(sample.service.get(name, 0.0) for name in names)) for sample in samples]
        ideals[tier] = ideal_shares([item for item in arrivals if item.tenant in names], served, names)
    return ideals


def arrivals_of(events: Sequence[LogEvent]) -> list[TenantArrival]:
    """A request that was never dispatched counts its predicted cost, unless it left."""
    final = {event.request_id: event.cost for event in events if event.happened is LogEventKind.ENDED}
    left = {event.request_id for event in events if event.happened is LogEventKind.LEFT}
    return [
        TenantArrival(event.at_s, event.tenant, final.get(event.request_id, event.cost))
        for event in events
        if event.happened is LogEventKind.ARRIVED and event.request_id not in left
    ]


def build_report(evidence: DemoEvidence) -> dict[str, Any]:
    """Fair shares are taken up to the last arrival: later the queue drains."""
    last_arrival_s = max((sent.sent_s for sent in evidence.sent), default=0.0)
    loaded = [sample for sample in evidence.samples if sample.at_s <= last_arrival_s]
    ideals = ideal_by_tier(evidence.cast, arrivals_of(evidence.events), loaded)
    start, end = (loaded[0], loaded[-1]) if loaded else (Sample(0, {}), Sample(0, {}))
    service = {
        tenant.name: end.service.get(tenant.name, 0.0) - start.service.get(tenant.name, 0.0)
        for tenant in evidence.cast
    }
    tier_service: dict[str, float] = defaultdict(float)
    for tenant in evidence.cast:
        tier_service[tenant.tier.value] += service[tenant.name]
    weights = {tenant.name: tenant.weight for tenant in evidence.cast}
    modest = {
        name for tier, ideal in ideals.items() for name in under_share(ideal, weights, tier_service[tier])
    }
    tenants = [
        _tenant(tenant, evidence, service[tenant.name], ideals[tenant.tier.value], modest)
        for tenant in evidence.cast
    ]
    heavy = [
        row for row in tenants if not row["under_its_share"] and row["fair_service_cost"] >= MIN_FAIR_COST
    ]
    return {
        "trace": asdict(evidence.replay) | {"requests": len(evidence.replay.requests)},
        "duration_s": evidence.duration_s,
        "machine": {
            "engine_waited_for_a_core": evidence.waited_for_a_core,
            "too_busy_to_judge_times": (evidence.waited_for_a_core or 0.0) > TOO_BUSY,
        },
        "engine": dict(evidence.engine),
        "capacity": dict(evidence.capacity),
        "requests": _requests(evidence),
        "backlog_s": evidence.audit.backlog_s,
        "audit": asdict(evidence.audit),
        "fairness": {
            "service_over_fair_share_of_tenants_above_their_share": {
                "least": min((row["share_of_ideal"] for row in heavy), default=None),
                "most": max((row["share_of_ideal"] for row in heavy), default=None),
                "jain_index": jain_index([row["share_of_ideal"] for row in heavy]),
            }
        },
        "tenants": tenants,
        "tiers": [
            _tier(tier, [sent for sent in evidence.sent if sent.tier == tier], evidence.bound_after.get(tier))
            for tier in ("interactive", "standard", "batch")
        ],
        "queue_wait_of_tenants_under_their_share": _waits(evidence, modest),
        "turns": dict(evidence.turns),
        "forms": dict(evidence.forms),
        "estimates": _estimates(evidence.sent),
        "refusals": dict(Counter(sent.refusal for sent in evidence.sent if sent.refusal)),
        "ledger": dict(evidence.ledger),
    }


def verdict(report: Mapping[str, Any], *, min_backlog_s: float) -> list[str]:
    audit = report["audit"]
    invalid = sum(row["asked"] - row["valid"] for form, row in report["forms"].items() if is_promised(form))
    backlog = f"only {report['backlog_s']:.0f} s of backlog, {min_backlog_s:.0f} s are needed"
    claims = {
        "the ledger and the counters disagree": not report["ledger"].get("exact"),
        f"{audit['inversions']} inversions": audit["inversions"],
        f"{audit['unfair_dispatches']} unfair dispatches": audit["unfair_dispatches"],
        f"{audit['untrue_ranks']} ranks that the charges do not explain": audit["untrue_ranks"],
        backlog: report["backlog_s"] < min_backlog_s,
        f"{invalid} answers are not valid in the form that was asked for": invalid,
        "no dispatch had another tenant waiting beside it": not audit["compared"],
    }
    return [claim for claim, is_so in claims.items() if is_so]


def _requests(evidence: DemoEvidence) -> dict[str, Any]:
    answered = [sent for sent in evidence.sent if sent.ok]
    return {
        "sent": len(evidence.sent),
        "answered": len(answered),
        "refused": sum(sent.refusal is not None for sent in evidence.sent),
        "cut": evidence.cut,
        "ended_by_the_model": sum(sent.finish_reason == "stop" for sent in answered),
        "prompt_tokens": sum(sent.prompt_tokens for sent in answered),
        "completion_tokens": sum(sent.completion_tokens for sent in answered),
        "longest_answer_tokens": max((sent.completion_tokens for sent in answered), default=0),
    }


def _tenant(
    tenant: CastTenant, evidence: DemoEvidence, service: float, ideal: FluidIdeal, modest: set[str]
) -> dict[str, Any]:
    mine = [sent for sent in evidence.sent if sent.tenant == tenant.name]
    fair = ideal.service[tenant.name]
    return {
        "tenant": tenant.name,
        "tier": tenant.tier.value,
        "weight": tenant.weight,
        "limit": None if tenant.limit is None else tenant.limit.mode.value,
        "requests": len(mine),
        "answered": sum(sent.ok for sent in mine),
        "refused": sum(sent.refusal is not None for sent in mine),
        "service_cost": service,
        "fair_service_cost": fair,
        "share_of_ideal": service / fair if fair > 0 else None,
        "under_its_share": tenant.name in modest,
        "ttft_s": _percentiles([sent.ttft_s for sent in mine]),
        "e2e_s": _percentiles([sent.e2e_s for sent in mine]),
    }


def _tier(tier: str, sent: Sequence[Sent], bound_after: int | None) -> dict[str, Any]:
    return {
        "tier": tier,
        "requests": len(sent),
        "answered": sum(item.ok for item in sent),
        "quotes_bind_after": bound_after,
        "wait_s": _waits_of(sent),
        "ttft_s": _percentiles([item.ttft_s for item in sent if item.ok]),
        "e2e_s": _percentiles([item.e2e_s for item in sent]),
    }


def _percentiles(values: Sequence[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    return {"p50": plain(quantile(known, 0.5)), "p99": plain(quantile(known, 0.99))}


def _waits_of(sent: Sequence[Sent]) -> dict[str, float | None]:
    waits = [
        (account["estimate"]["wait_s"]["p90"], account["actual"]["wait_s"])
        for account in (item.account for item in sent if item.ok)
        if account.get("estimate") and account["actual"].get("wait_s") is not None
    ]
    return {
        "p50": plain(quantile([wait_s for _, wait_s in waits], 0.5)),
        "p90": plain(quantile([wait_s for _, wait_s in waits], 0.9)),
        "under_told_p90": covered(waits + _known_misses(sent, "p90")),
    }


def _known_misses(sent: Sequence[Sent], name: str, factor: float = 1.0) -> list[tuple[float, float]]:
    """(Estimate, wait) of requests cut after over `factor` times the estimate; earlier cuts prove nothing."""
    return [
        (item.told_wait_s[name], item.cut_wait_s)
        for item in sent
        if item.told_wait_s is not None
        and item.cut_wait_s is not None
        and item.cut_wait_s > factor * max(item.told_wait_s[name], WAIT_FLOOR_S)
    ]


def _waits(evidence: DemoEvidence, modest: set[str]) -> dict[str, Any]:
    mine = {
        event.request_id
        for event in evidence.events
        if event.happened is LogEventKind.ARRIVED and event.tenant in modest and event.tier != "batch"
    }
    measured = queue_waits_s(evidence.events)
    return {
        "tenants": sorted(modest),
        "note": "tiers interactive and standard; batch waits behind both under either policy",
        "measured_p99_s": plain(quantile([wait for name, wait in measured.items() if name in mine], 0.99)),
        "simulated_p99_s": {
            policy: plain(quantile([wait for name, wait in waits.items() if name in mine], 0.99))
            for policy, waits in evidence.simulated_waits_s.items()
        },
        "simulated_duration_s": dict(evidence.simulated_duration_s),
    }


def _estimates(sent: Sequence[Sent]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    accounts = [item.account for item in sent if item.ok and item.account.get("estimate")]
    for name in ("wait_s", "ttft_s", "e2e_s", "output_tokens"):
        pairs = [
            (account["estimate"][name], account["actual"][name])
            for account in accounts
            if account["actual"].get(name) is not None
        ]
        floor = WAIT_FLOOR_S if name.endswith("_s") else 1.0
        far = _known_misses(sent, "p50", 2.0) if name == "wait_s" else []
        late = _known_misses(sent, "p90") if name == "wait_s" else []
        near = [(pair["p50"], actual) for pair, actual in pairs] + far
        figures[name] = {
            "requests": len(pairs),
            "share_within_2x": within_factor(near, 2.0, floor),
            "share_within_2x_of_waits_above_1_s": (
                within_factor([(told, actual) for told, actual in near if actual > 1.0], 2.0, floor)
                if name == "wait_s"
                else None
            ),
            "p90_coverage": covered([(pair["p90"], actual) for pair, actual in pairs] + late),
        }
    figures["cost_above_quoted_maximum"] = sum(
        account["actual"]["cost_nanousd"] > account["estimate"]["cost_nanousd"]["max"] for account in accounts
    )
    return figures
