"""Tests of the demo's report, on runs on a virtual clock."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from io import StringIO
from xml.etree import ElementTree

import msgspec
import pytest
from rich.console import Console

from engine.messages import TIER_RANKS
from engine.virtual.step_shapes import StepShape
from ops.demo.audit import LogEvent, LogEventKind, audit
from ops.demo.cast import CAST
from ops.demo.logbook import TIER_NAMES, events_of
from ops.demo.replay import Sent
from ops.demo.report import DemoEvidence, Sample, build_report, queue_waits_s, verdict
from ops.demo.simulate import PastRequest, served_machine, simulate
from ops.demo.summary import report_page, summary
from ops.demo.table import TenantRow, View
from ops.demo.trace import load_slice, plan
from ops.simulate.machines.machines import profile_machine
from ops.simulate.pool import SimulatedPool
from tests.support.builders import step_time

STEP_TIME = step_time(
    3e-3, 1e-4, per_context_token_s=1e-7, per_sequence_s=3e-4, samples=100, relative_error=0.05
)
MACHINE = profile_machine(
    "demo", STEP_TIME, kv_tokens=8192, context_tokens=4096, max_sequences=16, max_batched_tokens=512
)
REPLAY = plan(load_slice(), capacity_cost_per_s=3300, overload=1.8, span_s=30)
TENANTS = {tenant.name: tenant for tenant in CAST}


@cache
def requests() -> tuple[PastRequest, ...]:
    """Predictions are wrong in both directions, as real ones are."""
    return tuple(
        PastRequest(
            request_id=f"r{number}",
            tenant=request.tenant,
            tier=TIER_RANKS[TENANTS[request.tenant].tier.value],
            weight=TENANTS[request.tenant].weight,
            arrival_s=request.arrival_s,
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            predicted_output_tokens=max(1, request.output_tokens * (4 + number % 9) // 8),
        )
        for number, request in enumerate(REPLAY.requests)
    )


@cache
def run(policy: str) -> tuple[SimulatedPool, dict[str, float]]:
    return simulate(policy, requests(), MACHINE)


@cache
def events(policy: str) -> tuple[LogEvent, ...]:
    log = run(policy)[0].flow.log
    events = events_of(log.since(0, log.next_index))
    return tuple(replace(event, request_id=requests()[int(event.request_id)].request_id) for event in events)


def evidence(policy: str) -> DemoEvidence:
    """The virtual run as the demo would have seen it."""
    log = events(policy)
    service: dict[str, float] = {}
    samples = [Sample(0.0, {})]
    ended: dict[str, float] = {}
    for event in log:
        if event.happened is LogEventKind.ENDED:
            ended[event.request_id] = event.at_s
            service[event.tenant] = service.get(event.tenant, 0.0) + event.cost
            samples.append(Sample(event.at_s, dict(service)))
    waits = queue_waits_s(log)
    sent = [
        Sent(
            request.tenant,
            TIER_NAMES[request.tier],
            request.arrival_s,
            status=200,
            first_token_s=request.arrival_s + waits[request.request_id] + 0.01,
            ended_s=ended[request.request_id],
            prompt_tokens=request.input_tokens,
            completion_tokens=request.output_tokens,
            finish_reason="stop",
            account={
                "request_id": request.request_id,
                "estimate": {
                    "wait_s": {"p50": waits[request.request_id], "p90": 2 * waits[request.request_id]},
                    "ttft_s": {"p50": 1.0, "p90": 2.0},
                    "e2e_s": {"p50": 1.0, "p90": 2.0},
                    "output_tokens": {"p50": request.predicted_output_tokens, "p90": 300},
                    "cost_nanousd": {"max": 10},
                },
                "actual": {
                    "wait_s": waits[request.request_id],
                    "ttft_s": waits[request.request_id] + 0.01,
                    "e2e_s": ended[request.request_id] - request.arrival_s,
                    "output_tokens": request.output_tokens,
                    "cost_nanousd": 11 if number == 3 else 9,
                },
            },
        )
        for number, request in enumerate(requests())
    ]
    sent.append(Sent("m10", "standard", 1.0, status=429, refusal="insufficient_quota"))
    return DemoEvidence(
        cast=CAST,
        replay=REPLAY,
        sent=sent,
        samples=samples,
        events=log,
        audit=audit(log),
        ledger={
            "exact": True,
            "settles": len(requests()),
            "problems": [],
            "pages": {"read": 40, "differences": []},
        },
        capacity={"cost_tokens_per_s": 2000.0, "output_tokens_per_s": 800.0},
        engine={},
        turns={
            "slots": 1,
            "sequences": 3,
            "steps": 400,
            "weights": {"turns-light": 1.0, "turns-heavy": 3.0},
            "tokens": {"turns-light": 100, "turns-heavy": 300},
            "tokens_per_weight": {"turns-light": 100.0, "turns-heavy": 100.0},
        },
        forms={
            form: {"asked": 4, "valid": 4, "right": 3, "closed": 1, "first": ["As JSON: a = 1.", '{"a":1}']}
            for form in ("json", "plain", "cut", "calls")
        },
        duration_s=run(policy)[0].now_s,
        simulated_waits_s={name: run(name)[1] for name in ("vtc", "fcfs")},
    )


def test_the_virtual_run_serves_everybody_and_is_contended() -> None:
    for policy in ("vtc", "fcfs"):
        assert run(policy)[1].keys() == {request.request_id for request in requests()}
        report = audit(events(policy))
        assert report.dispatches == len(requests())
        assert report.compared > 100
        assert report.backlog_s > 20
        assert report.untrue_ranks == 0


def test_the_fair_queue_serves_nobody_out_of_turn_and_fcfs_does() -> None:
    fair, fcfs = audit(events("vtc")), audit(events("fcfs"))
    assert (fair.inversions, fair.unfair_dispatches) == (0, 0)
    assert fcfs.unfair_dispatches > 50
    assert fcfs.inversions == 0, "FCFS always sends the earliest: it is unfair in the other sense only"


def test_swapping_two_dispatches_of_a_fair_log_is_found() -> None:
    """The audit judges what happened, not what should have: the most served tenant is let through instead."""
    log = list(events("vtc"))
    arrived: dict[str, list[str]] = {}
    for place, event in enumerate(log):
        if event.happened is LogEventKind.ARRIVED:
            arrived.setdefault(event.tenant, []).append(event.request_id)
        if event.happened is LogEventKind.DISPATCHED:
            best = max(event.ranks, key=lambda name: event.ranks[name])
            if len(event.ranks) > 2 and event.ranks[best] > event.ranks[event.tenant] + 500:
                log[place] = replace(event, tenant=best, request_id=arrived[best][0])
                break
            arrived[event.tenant].remove(event.request_id)
    assert audit(log[: place + 1]).unfair_dispatches == 1


def test_the_report_compares_service_with_fair_shares() -> None:
    report = build_report(evidence("vtc"))
    rows = {row["tenant"]: row for row in report["tenants"]}
    assert len(rows) == 27
    standard = [row for row in rows.values() if row["tier"] == "standard"]
    served = sum(row["service_cost"] for row in standard)
    ideal = sum(row["fair_service_cost"] for row in standard)
    assert served == pytest.approx(ideal, rel=0.02)
    heavy = [row for row in standard if not row["under_its_share"] and row["fair_service_cost"] > 4000]
    assert len(heavy) >= 3
    assert all(0.85 < row["share_of_ideal"] < 1.15 for row in heavy)
    unfair = {row["tenant"]: row for row in build_report(evidence("fcfs"))["tenants"]}
    worst = max(abs(unfair[row["tenant"]]["share_of_ideal"] - 1) for row in heavy)
    assert worst > 0.5, "the yardstick must tell FCFS from a fair queue"


def test_tenants_under_their_share_wait_less_than_under_fcfs() -> None:
    waits = build_report(evidence("vtc"))["queue_wait_of_tenants_under_their_share"]
    assert waits["tenants"]
    assert waits["measured_p99_s"] == pytest.approx(waits["simulated_p99_s"]["vtc"], rel=0.05)
    assert waits["simulated_p99_s"]["vtc"] < waits["simulated_p99_s"]["fcfs"] / 4


def test_policies_are_compared_on_the_machine_that_served() -> None:
    """By its mean step and its ceiling: not on the faster one of its typical steps."""
    engine = {
        "step_time": step_time(0.001, 1e-4),
        "mean_step_time": step_time(0.002, 4e-4),
        "kv_blocks": {"total": 100}, "block_tokens": 16, "max_sequences": 3, "max_batched_tokens": 256,
    }  # fmt: skip
    machine = served_machine(msgspec.to_builtins(engine), 1_000)

    assert machine.timing.step_s(StepShape(0, 0, 1, 9, 1)) == pytest.approx(0.0024)
    assert machine.timing.step_s(StepShape(100, 9, 0, 0, 1)) == pytest.approx(0.1)
    assert (machine.kv_tokens, machine.max_sequences) == (1600, 3)


def test_estimates_refusals_and_costs_are_counted() -> None:
    report = build_report(evidence("vtc"))
    assert report["estimates"]["wait_s"]["share_within_2x"] == 1.0
    assert report["estimates"]["wait_s"]["p90_coverage"] == 1.0
    assert report["estimates"]["cost_above_quoted_maximum"] == 1
    assert report["refusals"] == {"insufficient_quota": 1}
    assert report["requests"]["answered"] == len(requests())
    json.dumps(report)


def test_what_was_cut_after_longer_than_it_was_told_is_a_miss_and_else_nothing_is_known_of_it() -> None:
    seen = evidence("vtc")
    told = {"p50": 1.0, "p90": 3.0}
    answered = sum(sent.ok and sent.tier == "batch" for sent in seen.sent)
    for cut_s in (1.5, 2.5, 4.0, 4.0):
        seen.sent.append(Sent("m10", "batch", 10.0, status=200, told_wait_s=told, cut_s=10.0 + cut_s))  # type: ignore[attr-defined]
    seen.sent.append(Sent("m10", "batch", 10.0, status=200, told_wait_s=told, cut_s=99.0, first_token_s=11.0))  # type: ignore[attr-defined]
    seen.bound_after = {"standard": 41}
    report = build_report(seen)
    everyone = len(requests())
    assert report["estimates"]["wait_s"]["share_within_2x"] == pytest.approx(everyone / (everyone + 3))
    assert report["estimates"]["wait_s"]["p90_coverage"] == pytest.approx(everyone / (everyone + 2))
    tiers = {row["tier"]: row for row in report["tiers"]}
    assert tiers["batch"]["wait_s"]["under_told_p90"] == pytest.approx(answered / (answered + 2))
    assert [tiers[tier]["quotes_bind_after"] for tier in ("standard", "batch")] == [41, None]
    assert "never" in rendered(summary(report), 160)


def test_the_verdict_names_what_did_not_hold() -> None:
    report = build_report(evidence("vtc"))
    assert verdict(report, min_backlog_s=20) == []
    assert "backlog" in verdict(report, min_backlog_s=600)[0]
    report["ledger"] = {"exact": False}
    report["audit"] |= {"inversions": 3, "compared": 0, "untrue_ranks": 2}
    report["forms"]["plain"]["valid"] = 1
    assert len(verdict(report, min_backlog_s=0)) == 4
    report["forms"]["cut"]["valid"] = 2
    assert "2 answers are not valid" in verdict(report, min_backlog_s=0)[-2]


def rendered(what: object, width: int, height: int = 60) -> str:
    console = Console(file=StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(what)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_page_of_the_report_has_its_figures_and_its_tables() -> None:
    report = build_report(evidence("vtc"))
    page = ElementTree.fromstring(report_page(report).removeprefix("<!doctype html>"))
    exact = page.find(".//pre[@id='exact']")
    assert exact is not None
    assert json.loads(exact.text or "") == json.loads(json.dumps(report))
    cells = {"".join(cell.itertext()) for cell in page.iter("td")}
    assert {row["tier"] for row in report["tiers"]} <= cells
    shares = [
        f"{row['share_of_ideal']:.2f}" for row in report["tenants"] if row["share_of_ideal"] is not None
    ]
    drawn = [text.text for text in page.iter("{http://www.w3.org/2000/svg}text")]
    assert set(shares) <= set(drawn)


def test_the_report_is_readable_as_text() -> None:
    text = rendered(summary(build_report(evidence("vtc"))), 120)
    assert "inversions: 0" in text
    assert "Ledger = counters: exact" in text
    assert "insufficient_quota 1" in text
    line = "weight 1: 100 tokens (100 per weight), weight 3: 300 tokens (100 per weight)"
    assert line in " ".join(text.split())
    assert all(tenant.name in text for tenant in CAST)


def test_the_live_table_keeps_to_the_screen_and_says_what_it_leaves_out() -> None:
    rows = [
        TenantRow(tenant.name, tenant.tier.value, tenant.weight, place, 1, 12.3, 0.1, 0.1, 0.05, 2.5, 0.5, 0)
        for place, tenant in enumerate(CAST)
    ]
    view = View(12.0, 100, 400, 50, 3, 30, 20, 900.0, "replay", rows)
    whole = rendered(view, 130)
    assert all(tenant.name in whole for tenant in CAST)
    small = rendered(view, 130, height=20)
    assert small.count("\n") <= 20
    assert "tenants more" in small
    assert CAST[-1].name in small
    assert "sent 100/400" in view.headline()
