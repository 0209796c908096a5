"""Conditions of alerts, from figures that the server has. Pure; instants are microseconds since 1970."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple
from urllib.parse import quote, urlencode

from tenants.outbox import kinds
from tenants.outbox.transitions import Condition
from tenants.slo.slo import DAY_S, SloBook, SloTally, burning_over
from tenants.slo.target import Slo
from tenants.types import Tier

KEY_EXPIRES_US = 7 * DAY_S * 1_000_000
LEAST_JUDGED = 200
"""Requests, before a coverage is judged."""
COVERED = (0.85, 0.95)
"""Bounds of the share that stays within the stated 90th percentile."""
LATE_CHECKPOINTS = 3
"""Times the audit's checkpoint interval, and a minute."""


class ExpiringKey(NamedTuple):
    key_id: str
    name: str
    tenant_id: str
    expires_us: int


class Kept(NamedTuple):
    """How often a stated figure was kept."""

    model: str
    figure: str
    requests: int
    within_p90: int


def slo_burns(
    windows: Mapping[tuple[str, str, str], Mapping[int, SloTally]], targets: Iterable[Slo], least_misses: int
) -> list[Condition]:
    """Error budgets that burn. `windows`: by tenant, tier and metric."""
    book = SloBook(targets)
    conditions = []
    for (tenant_id, tier, metric), tallies in windows.items():
        slo = next((target for target in book.of(tenant_id, Tier(tier)) if target.metric == metric), None)
        for burn in () if slo is None else burning_over(tallies, slo.per_mille, least_misses):
            if not burn.fires:
                continue
            hours = burn.alert.long_s / 3_600
            rate = "" if burn.long_rate in (None, float("inf")) else f"{burn.long_rate:.1f}x "
            tally = tallies[burn.alert.long_s]
            conditions.append(
                Condition(
                    kinds.SLO_BURN,
                    f"{tenant_id}:{tier}:{metric}:{burn.alert.long_s}",
                    f"{tier} {metric}: error budget burning {rate}too fast (last {hours:g} h)",
                    tenant_id,
                    "/console/slo?" + urlencode({"tenant": tenant_id, "tier": tier}),
                    {
                        "tier": tier,
                        "metric": metric,
                        "requests": tally.total,
                        "missed": tally.missed,
                        **burn.as_json(),
                    },
                    "page" if burn.alert.severity == "page" else "ticket",
                )
            )
    return conditions


def expiring_keys(keys: Iterable[ExpiringKey], now_us: int) -> list[Condition]:
    return [
        Condition(
            kinds.KEY_EXPIRES,
            key.key_id,
            f"key {key.name or key.key_id} expires in {_days(key.expires_us - now_us)}",
            key.tenant_id,
            f"/console/tenants/{quote(key.tenant_id)}/keys/{quote(key.key_id)}",
            {"key": key.key_id, "expires_us": key.expires_us},
        )
        for key in keys
        if now_us < key.expires_us <= now_us + KEY_EXPIRES_US
    ]


def ledger_drift(problems: int) -> list[Condition]:
    text = f"usage sums differ from the ledger in {problems} places"
    evidence = {"problems": problems}
    page = "/console/usage/check"
    return [Condition(kinds.LEDGER_DRIFT, "usage", text, page=page, evidence=evidence)] if problems else []


def leaked_holds(overdue: int) -> list[Condition]:
    """Holds that are older than their lease and not settled."""
    text = f"{overdue} requests of dead gateways still hold budget"
    return [Condition(kinds.HOLDS_LEAKED, "holds", text, evidence={"holds": overdue})] if overdue else []


def calibration_off(counts: Iterable[Kept]) -> list[Condition]:
    """Figures whose 90th percentile was kept too rarely or too often, of those with enough requests."""
    conditions = []
    for count in counts:
        covered = count.within_p90 / count.requests if count.requests else 0.0
        if count.requests >= LEAST_JUDGED and not COVERED[0] <= covered <= COVERED[1]:
            conditions.append(
                Condition(
                    kinds.CALIBRATION,
                    f"{count.model}:{count.figure}",
                    f"{count.model}: {covered:.0%} of {count.requests} requests stayed within their"
                    f" estimated p90 of {count.figure}",
                    page="/console/quotes?" + urlencode({"figure": count.figure}),
                    evidence=count._asdict(),
                )
            )
    return conditions


def saturation(refused: int, minutes: int, least: int) -> list[Condition]:
    """A full queue that refused at least `least` requests."""
    text = f"{refused} requests refused because the queue was full (last {minutes} minutes)"
    page, evidence = "/console/refusals?code=queue_full", {"refused": refused, "minutes": minutes}
    return (
        [Condition(kinds.SATURATION, "queue", text, page=page, evidence=evidence)] if refused >= least else []
    )


def audit_signing(
    size: int, signed: int, signed_us: int | None, now_us: int, interval_s: float, complaint: str
) -> list[Condition]:
    """A damaged or late audit. `signed_us`: of the newest checkpoint; `complaint`: a gateway's finding."""
    page, conditions = "/console/audit", []
    if complaint:
        conditions.append(Condition(kinds.AUDIT_DAMAGED, "log", complaint, page=page))
    allowed_s = late_after_s(interval_s)
    age_s = None if signed_us is None else (now_us - signed_us) / 1e6
    if size > signed and age_s is not None and age_s > allowed_s:
        text = f"{size - signed} rows of the audit are not signed; the newest checkpoint is {age_s:.0f} s old"
        evidence = {"rows": size, "signed": signed, "age_s": round(age_s)}
        conditions.append(Condition(kinds.AUDIT_LATE, "log", text, page=page, evidence=evidence))
    return conditions


def late_after_s(interval_s: float) -> float:
    """The age at which a checkpoint is late."""
    return LATE_CHECKPOINTS * interval_s + 60


def backup_late(taken_us: int | None, now_us: int, late_s: float) -> list[Condition]:
    """`taken_us`: of the newest backup, or the database's first instant; `late_s` 0: never."""
    age_s = 0.0 if taken_us is None else (now_us - taken_us) / 1e6
    if not 0 < late_s < age_s:
        return []
    text = f"no backup was taken for {_days(now_us - (taken_us or 0))}"
    return [Condition(kinds.BACKUP_LATE, "database", text, evidence={"age_s": round(age_s)})]


def replicas_down(replicas: Iterable[tuple[str, str, str]]) -> list[Condition]:
    """Replicas (model, name at a gateway, name in the installation) that do not serve."""
    return [
        Condition(
            kinds.REPLICA_DOWN,
            f"{pool}:{unique or name}",
            f"replica {name} of {pool} is down",
            page="/console/upstreams",
            evidence={"model": pool, "replica": name},
        )
        for pool, name, unique in replicas
    ]


def _days(us: int) -> str:
    hours = us / 3.6e9
    return f"{hours / 24:.1f} days" if hours >= 48 else f"{hours:.1f} hours"
