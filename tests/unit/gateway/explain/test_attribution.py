"""The rules of attribution, in their order."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from msgspec import structs

from engine.messages import SequenceOutcome
from engine.step_time.model import PRIOR
from gateway.domain.estimate import Times
from gateway.domain.usage import SequenceUse, use_of
from gateway.explain.attribution import (
    Counterfactuals,
    Metric,
    RequestFacts,
    cause_of,
    judge,
    verdict_of,
)
from gateway.explain.fluid_share import FluidMachine, Job
from gateway.explain.load_log import LoadLog
from gateway.explain.recorder import facts_of
from gateway.requests.run import Events, Run
from tenants.outcomes import Cause, RequestOutcome
from tenants.pricing.pricing import uniform_book
from tests.support import builders
from tests.support.miss_evidence import contradiction

JOB = Job("r", "acme", 1, 1.0, 10.0, 64, 41)
FACTS = RequestFacts(JOB, 10.0, RequestOutcome.COMPLETED, 12.0, 14.0, 14.1)
FINE = Counterfactuals(0.1, 0.2, 0.2, 0.2, 0.2)
MACHINE = FluidMachine(PRIOR, 8, 256, 65_536)


def test_a_request_is_measured_from_its_arrival() -> None:
    assert FACTS.actual_s(Metric.TTFT) == 2.0
    assert FACTS.actual_s(Metric.E2E) == 4.0
    assert FACTS.actual_s(Metric.TPOT) == pytest.approx(2.0 / 40)


def test_what_never_came_is_missed_unless_the_client_left_before_its_target() -> None:
    expired = replace(FACTS, outcome=RequestOutcome.EXPIRED, first_token_s=None, last_token_s=None)
    left = replace(expired, outcome=RequestOutcome.DISCONNECTED)

    assert expired.misses(Metric.TTFT, 60.0) is True
    assert left.misses(Metric.TTFT, 60.0) is None
    assert left.misses(Metric.TTFT, 1.0) is True


def test_a_single_token_has_no_time_per_token() -> None:
    single = replace(FACTS, job=structs.replace(JOB, output_tokens=1))

    assert single.actual_s(Metric.TPOT) is None
    assert single.misses(Metric.TPOT, 0.001) is None


@pytest.mark.parametrize(
    ("seen", "cause"),
    [
        (replace(FINE, alone_s=1.1, fair_s=2.0, fair_unlimited_s=2.0), Cause.REQUEST),
        (replace(FINE, fair_s=1.1), Cause.QUOTA),
        (replace(FINE, fair_s=1.1, fair_unlimited_s=1.1), Cause.FAULT),
        (replace(FINE, fair_s=1.1, fair_unlimited_s=1.1, fair_without_outages_s=1.1), Cause.QUOTA),
        (Counterfactuals(0.1, 1.1, 1.1, 1.1, 1.1), Cause.CAPACITY),
        (FINE, Cause.SCHEDULING),
    ],
)
def test_the_first_counterfactual_that_holds_is_the_cause(seen: Counterfactuals, cause: Cause) -> None:
    assert cause_of(FACTS, Metric.TTFT, 1.0, seen) is cause


def test_a_fault_is_a_fault_whatever_else_there_was() -> None:
    lost = replace(FACTS, outcome=RequestOutcome.ENGINE_LOST)

    assert cause_of(lost, Metric.E2E, 1.0, replace(FINE, alone_s=9.0)) is Cause.FAULT


def test_a_reader_that_stood_still_is_to_blame_only_after_the_first_token() -> None:
    stalled = replace(FACTS, stalled_s=3.5)

    assert cause_of(stalled, Metric.E2E, 1.0, FINE) is Cause.CLIENT
    assert cause_of(stalled, Metric.TPOT, 0.01, replace(FINE, alone_s=0.0, fair_s=0.0)) is Cause.CLIENT
    assert cause_of(stalled, Metric.TTFT, 1.0, FINE) is Cause.SCHEDULING


@pytest.mark.parametrize(
    ("seen", "otherwise"),
    [
        (FINE, Cause.SCHEDULING),
        (Counterfactuals(0.1, 1.1, 1.1, 1.1, 1.1), Cause.CAPACITY),
        (None, Cause.UNKNOWN),
    ],
)
def test_the_gateways_lag_and_its_stores_are_tried_together(
    seen: Counterfactuals | None, otherwise: Cause
) -> None:
    """Neither explains the miss alone."""
    both = replace(FACTS, store_s=0.7, first_lag_s=0.4, last_lag_s=0.4)

    assert cause_of(both, Metric.TTFT, 1.0, seen) is Cause.GATEWAY
    assert cause_of(replace(both, store_s=0.0), Metric.TTFT, 1.0, seen) is otherwise
    assert cause_of(replace(both, first_lag_s=0.0), Metric.TTFT, 1.0, seen) is otherwise
    assert cause_of(replace(both, first_lag_s=0.0, last_lag_s=2.4), Metric.E2E, 1.0, seen) is Cause.GATEWAY


async def test_a_starved_gateway_is_not_our_policy() -> None:
    """2.68 s until its budget was durable, and 0.84 s until the gateway had what the engine had made."""
    outcome = SequenceOutcome(
        "r.0", "r", "ten", "stop", 10, 0, 10, 8, first_token_s=0.07, finished_s=0.2, chunks=[(0.07, 10)]
    )
    use = SequenceUse(10, outcome=outcome)
    times = Times(10.0, 12.69, 13.6, 13.6, 13.7)
    run = Run(builders.call(), times, [use], uniform_book({}), Events(9, most_bytes=9))
    run.in_line_s = 12.68
    facts = facts_of(run, RequestOutcome.COMPLETED, use_of([use], 1, dispatched=True))
    (verdict,) = judge([(facts, Metric.TTFT, 0.5)], [], MACHINE)

    assert (verdict.cause, verdict.evidence["store_s"]) == (Cause.GATEWAY, 2.68)
    assert verdict.evidence["first_lag_s"] == pytest.approx(0.84)


def test_a_lag_is_in_the_time_per_token_only_where_it_grew() -> None:
    seen = replace(FINE, alone_s=0.0, fair_s=0.0)
    lagged = replace(FACTS, store_s=9.0, first_lag_s=0.1, last_lag_s=1.8)

    assert cause_of(lagged, Metric.TPOT, 0.01, seen) is Cause.GATEWAY
    assert cause_of(replace(lagged, first_lag_s=1.7), Metric.TPOT, 0.01, seen) is Cause.SCHEDULING


def test_without_a_step_time_model_only_what_was_measured_is_blamed() -> None:
    assert cause_of(FACTS, Metric.TTFT, 1.0, None) is Cause.UNKNOWN
    assert cause_of(replace(FACTS, limited_s=1.5), Metric.TTFT, 1.0, None) is Cause.QUOTA
    assert cause_of(replace(FACTS, stalled_s=3.5), Metric.E2E, 1.0, None) is Cause.CLIENT


def test_the_evidence_is_stored_with_the_verdict() -> None:
    (verdict,) = judge([(FACTS, Metric.TTFT, 1.0)], [], MACHINE)

    assert verdict.cause is Cause.SCHEDULING
    assert verdict.actual_s == 2.0
    alone_s, fair_s = verdict.evidence["alone_s"], verdict.evidence["fair_s"]
    assert alone_s is not None
    assert fair_s is not None
    assert 0 < alone_s < fair_s < 0.1
    assert verdict.evidence["fair_without_own_s"] is None, "it was not asked"


def test_what_became_of_a_request_does_not_end_it_in_the_other_worlds() -> None:
    """It left the queue before its dispatch; under the fair share it would have been dispatched."""
    expired = replace(
        FACTS, job=structs.replace(JOB, left_s=10.001), outcome=RequestOutcome.EXPIRED,
        first_token_s=None, last_token_s=None,
    )  # fmt: skip
    (verdict,) = judge([(expired, Metric.TTFT, 1.0)], [expired.job], MACHINE)

    assert verdict.cause is Cause.SCHEDULING
    assert math.isinf(verdict.actual_s)


def test_verdicts_come_in_the_order_in_which_they_were_asked_for() -> None:
    later = replace(
        FACTS, job=structs.replace(JOB, job_id="later", arrived_s=20.0), arrived_s=20.0, first_token_s=29.0
    )
    verdicts = judge([(later, Metric.TTFT, 1.0), (FACTS, Metric.TTFT, 1.5)], [], MACHINE)

    assert [each.target_s for each in verdicts] == [1.0, 1.5]
    assert [each.actual_s for each in verdicts] == [9.0, 2.0]


def test_the_load_begins_where_nothing_was_there() -> None:
    log = LoadLog()
    for number, (since_s, ended_s) in enumerate([(0.0, 1.0), (0.5, 2.0), (5.0, 6.0), (5.5, None)]):
        log.arrived(f"r{number}", "acme", 1, 1.0, since_s, 10, 10)
        if ended_s is not None:
            log.ended(f"r{number}", ended_s, 10, 0, 10, is_complete=True)

    assert [job.job_id for job in log.jobs(until_s=6.0, since_s=5.2)] == ["r2", "r3"]
    assert [job.job_id for job in log.jobs(until_s=6.0, since_s=0.7)] == ["r0", "r1", "r2", "r3"]


def test_the_load_is_bounded_and_says_what_it_forgot() -> None:
    log = LoadLog(max_kept=3)
    for number in range(5):
        log.arrived(f"r{number}", "acme", 1, 1.0, float(number), 10, 10)
    for number in range(100):
        log.serving(float(number), number % 2)

    assert len(log) == 3
    assert log.forgotten == 2
    assert len(log.serving_since()) <= 64


def test_what_was_taken_away_leaves_the_fluid_when_it_left() -> None:
    log = LoadLog()
    log.arrived("gone", "acme", 1, 1.0, 1.0, 10, 99)
    log.ended("gone", 3.0, 0, 0, 0, is_complete=False)
    log.arrived("done", "acme", 1, 1.0, 1.0, 10, 99)
    log.ended("done", 3.0, 8, 2, 7, is_complete=True)
    gone, done = log.jobs(9.0)

    assert gone.left_s == 3.0
    assert (done.left_s, done.input_tokens, done.cached_tokens, done.output_tokens) == (math.inf, 8, 2, 7)


def test_no_cause_is_ruled_out_by_its_own_evidence() -> None:
    draw = random.Random(1)
    seen_causes = set()
    for number in range(20_000):
        alone_s, more_s = draw.uniform(0.1, 1.3), draw.uniform(0.0, 1.5)
        fair_s = alone_s + more_s
        better = [alone_s + more_s * draw.choice((0.0, 0.5, 1.0)) for _ in range(3)]
        facts = replace(
            FACTS,
            limited_s=draw.choice((0.0, 0.8)),
            store_s=draw.choice((0.0, 0.9, 1.8)),
            first_lag_s=draw.choice((0.0, 0.4)),
            last_lag_s=draw.choice((0.0, 1.2)),
            stalled_s=draw.choice((0.0, 2.5)),
        )
        metric = (Metric.TTFT, Metric.E2E)[number % 2]
        verdict = verdict_of(facts, metric, 1.0, Counterfactuals(alone_s, fair_s, *better))
        seen_causes.add(verdict.cause)
        assert not contradiction(verdict.cause, metric.value, 1.0, verdict.actual_s, verdict.evidence), (
            verdict
        )
    causes = {Cause.REQUEST, Cause.QUOTA, Cause.FAULT, Cause.CAPACITY, Cause.SCHEDULING, Cause.GATEWAY}
    assert causes <= seen_causes
    late = {"alone_s": 0.055, "fair_s": 1.05, "store_s": 1.2}
    assert contradiction(Cause.CAPACITY, "ttft", 1.0, 1.3, late), "advises a replica for a slow disk"
    assert not contradiction(Cause.GATEWAY, "ttft", 1.0, 1.3, late)
    assert contradiction(Cause.REQUEST, "ttft", 1.0, 1.3, late)
    assert contradiction(Cause.SCHEDULING, "ttft", 1.0, 1.3, late | {"store_s": 0.0})
