"""Which traces are kept, and why; the same ratio as OpenTelemetry's own sampler."""

from __future__ import annotations

import random

import pytest
from opentelemetry.sdk.trace.sampling import Decision as Sampled
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

from engine.messages import Decision, SequenceOutcome
from gateway.trace_context import SAMPLED, RequestTrace, TraceContext
from gateway.tracing.decision import ERRORS, KeepCause, TraceRule
from tenants.outcomes import RequestOutcome

REQUEST = "req_1"
CALLER = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
NONE = TraceRule(0.0)


def outcome(preemptions: int = 0, *decisions: Decision) -> SequenceOutcome:
    return SequenceOutcome(
        "req_1.0", REQUEST, "ten_1", "stop", 1, 0, 1, 1, preemptions=preemptions, decisions=list(decisions)
    )


def paused(*others: str, kind: str = "pause") -> Decision:
    return Decision(1, 0.0, kind, "req_1.0", "rule", [], list(others))


def cause(
    rule: TraceRule = NONE,
    ended: RequestOutcome = RequestOutcome.COMPLETED,
    *outcomes: SequenceOutcome,
    kept: bool | None = None,
    missed: bool = False,
    caller: TraceContext | None = None,
) -> KeepCause | None:
    trace = rule.trace_of(REQUEST, caller)
    return rule.cause_to_keep(trace, ended, outcomes, is_quote_kept=kept, has_missed=lambda: missed)


@pytest.mark.parametrize("ended", sorted(ERRORS))
def test_errors_are_kept(ended: RequestOutcome) -> None:
    assert cause(NONE, ended) is KeepCause.ERROR


@pytest.mark.parametrize("ended", sorted(set(RequestOutcome) - ERRORS))
def test_answers_and_what_the_client_ended_are_not(ended: RequestOutcome) -> None:
    assert cause(NONE, ended) is None


def test_a_broken_quote_is_kept_and_one_that_was_kept_or_not_judged_is_not() -> None:
    assert cause(kept=False) is KeepCause.QUOTE_BROKEN
    assert cause(kept=True) is None
    assert cause(kept=None) is None


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [
        (outcome(), None),
        (outcome(1), KeepCause.PREEMPTED),
        (outcome(0, paused("req_2.0")), KeepCause.PREEMPTED),
        (outcome(0, paused("req_2.0", kind="suspend")), KeepCause.PREEMPTED),
        (outcome(0, paused()), None),
        (outcome(0, paused("req_2.0", kind="admit")), None),
    ],
)
def test_what_was_displaced_is_kept(sequence: SequenceOutcome, expected: KeepCause | None) -> None:
    assert cause(NONE, RequestOutcome.COMPLETED, outcome(), sequence) is expected


def test_a_missed_target_is_kept_and_asked_for_only_where_nothing_else_is_wrong() -> None:
    assert cause(missed=True) is KeepCause.SLO_MISSED

    def asked() -> bool:
        raise AssertionError("it is kept anyway")

    trace = NONE.trace_of(REQUEST, None)
    found = NONE.cause_to_keep(trace, RequestOutcome.FAILED, (), is_quote_kept=None, has_missed=asked)
    assert found is KeepCause.ERROR


def test_a_sampled_parent_is_kept_and_another_is_not() -> None:
    sampled = TraceContext(CALLER.trace_id, CALLER.span_id, SAMPLED)
    assert cause(caller=sampled) is KeepCause.PARENT_SAMPLED
    assert cause(caller=CALLER) is None


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.37, 1.0])
def test_the_ratio_keeps_the_traces_that_opentelemetry_would(ratio: float) -> None:
    draw, rule, sampler = random.Random(ratio), TraceRule(ratio), TraceIdRatioBased(ratio)
    ids = [draw.getrandbits(128) or 1 for _ in range(2_000)]
    theirs = [sampler.should_sample(None, each, "x").decision is Sampled.RECORD_AND_SAMPLE for each in ids]
    assert [rule.samples(f"{each:032x}") for each in ids] == theirs
    assert any(theirs) == (ratio > 0)


def test_a_trace_of_its_own_says_from_the_start_whether_the_ratio_keeps_it() -> None:
    rule = TraceRule(0.5)
    traces = [rule.trace_of(f"req_{number}", None) for number in range(200)]
    kept = [bool(each.flags & SAMPLED) for each in traces]
    assert kept == [rule.samples(each.trace_id) for each in traces]
    assert 60 < sum(kept) < 140
    assert rule.trace_of(REQUEST, CALLER) == RequestTrace(REQUEST, CALLER.trace_id, CALLER.span_id, 0), (
        "a caller's flags are passed on as they are"
    )
