"""Refusals on arrival: for a deadline always, for a target only where the control loop says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.dispatch.admission import MEMORY_S, Admission, EstimateExceeds, NotInTime, require_bounds
from gateway.dispatch.dispatcher import NoEngineAvailable
from gateway.domain.call import Call
from gateway.domain.fallback import Fallback, NoneTook
from gateway.error_mapping import as_api_error
from gateway.errors import ApiError
from gateway.flow.deadline_check import DOUBTED_ONE_IN, TRIED_ONE_IN
from tenants.pricing.pricing import Price, uniform_book
from tenants.types import Tier
from tests.support import builders

CALL = builders.call()
EXPECTED = builders.estimate(wait_s=(5.0, 9.0), ttft_s=(6.0, 10.0))


REFUSED: list[tuple[str, Tier, str]] = []


def gate(strictness: float = 1.0, **targets_s: float) -> Admission:
    def targets(tenant_id: str, tier: Tier) -> Mapping[str, float]:
        return targets_s if (tenant_id, tier) == ("ten_1", Tier.STANDARD) else {}

    admission = Admission(targets, lambda *refused: REFUSED.append(refused))
    admission.strictness = strictness
    return admission


def refused(admission: Admission, call: Call = CALL, **limits: Any) -> ApiError:
    with pytest.raises(NotInTime) as caught:
        admission.check(call, EXPECTED, 100.0, **limits)
    admission.refused(call, caught.value)
    return as_api_error(caught.value, call.request_id)


def test_a_deadline_refuses_whatever_targets_there_are() -> None:
    error = refused(gate(0.0), expires_s=104.0)
    assert (error.status, error.code, error.retry_after_s) == (503, "deadline_unreachable", 1.0)
    early = gate(0.0)
    early.check(CALL, EXPECTED, 100.0, 106.0)
    early.factor = 2.0
    assert refused(early, expires_s=106.0).code == "deadline_unreachable"


def bounded(**bounds: Any) -> ApiError | None:
    """What `CALL` (10 tokens at 100 nano-dollars, 40 at 300, a p90 of 9 s) is refused with."""
    try:
        require_bounds(replace(CALL, **bounds), EXPECTED, uniform_book({"m": Price(100, 50, 300)}))
    except EstimateExceeds as exceeds:
        return as_api_error(exceeds, "req_1")
    return None


def test_what_a_client_allows_is_compared_with_the_told_p90_and_with_the_most_it_can_cost() -> None:
    assert bounded() is None
    assert bounded(max_wait_s=9.0, max_cost_nanousd=13_000) is None
    wait = bounded(max_wait_s=8.9)
    assert wait is not None
    assert (wait.status, wait.code, wait.param) == (409, "estimate_exceeds", "X-Fairgate-Max-Wait-S")
    assert wait.should_retry is False
    assert "may wait 9.000 s for its turn (p90), but 'X-Fairgate-Max-Wait-S' allows 8.9 s" in wait.message
    cost = bounded(max_cost_nanousd=12_999)
    assert cost is not None
    assert "may cost 0.000013 USD, but 'X-Fairgate-Max-Cost-Usd' allows 0.000012999 USD" in cost.message


def test_a_wait_that_nothing_is_known_of_is_not_within_any_bound() -> None:
    call = replace(CALL, max_wait_s=100.0)
    with pytest.raises(ApiError) as refused:
        require_bounds(call, None, uniform_book({"m": Price(100, 50, 300)}))
    assert (refused.value.code, refused.value.param) == ("estimates_off", "X-Fairgate-Max-Wait-S")


def test_a_target_refuses_who_would_miss_it_and_says_when_to_come_again() -> None:
    error = refused(gate(ttft=2.0))
    assert (error.status, error.code, error.retry_after_s) == (503, "target_unreachable", 8.0)
    assert error.should_retry
    assert REFUSED[-1] == ("ten_1", Tier.STANDARD, "ttft")
    assert "first token may take 10.0 s (p90), and its target is 2 s" in error.message
    assert "answer may take 20.0 s" in refused(gate(e2e=8.0)).message
    assert REFUSED[-1] == ("ten_1", Tier.STANDARD, "e2e")
    gate(ttft=10.0, e2e=20.0).check(CALL, EXPECTED, 100.0)
    gate(tpot=0.01).check(CALL, EXPECTED, 100.0)


def test_a_target_is_missed_only_where_no_other_pool_takes_the_request() -> None:
    admission, before = gate(ttft=2.0), list(REFUSED)
    with pytest.raises(NotInTime) as caught:
        admission.check(CALL, EXPECTED, 100.0)
    assert before == REFUSED
    admission.refused(CALL, ValueError("something else"))
    admission.refused(CALL, NoneTook(NoEngineAvailable(), Fallback("big", None)))
    assert before == REFUSED
    admission.refused(CALL, NoneTook(caught.value, Fallback("big", None)))
    assert [*before, ("ten_1", Tier.STANDARD, "ttft")] == REFUSED


@pytest.mark.parametrize(
    ("strictness", "is_refused"), [(0.0, False), (0.2, False), (0.21, True), (1.0, True)]
)
def test_the_strictness_says_by_how_much(strictness: float, is_refused: bool) -> None:
    admission = gate(strictness, ttft=2.0)
    if is_refused:
        assert refused(admission).retry_after_s == pytest.approx(max(1.0, 10.0 - 2.0 / strictness))
    else:
        admission.check(CALL, EXPECTED, 100.0)


def test_whoever_has_no_target_or_a_quote_or_no_forecast_is_let_in() -> None:
    strict = gate(ttft=0.1)
    strict.check(replace(CALL, tier=Tier.BATCH), EXPECTED, 100.0)
    binding: Any = object()
    strict.check(replace(CALL, binding=binding), EXPECTED, 100.0)
    strict.factor = 2.0
    strict.check(replace(CALL, binding=binding), EXPECTED, 100.0, 106.0)
    assert refused(strict, expires_s=106.0).code == "deadline_unreachable", "a knob refuses others"
    strict.check(CALL, None, 100.0)
    assert strict.expected_late.at(100.0) == 0.0, "and says nothing of those that have one"


def test_it_counts_who_would_be_late_whether_refused_or_not() -> None:
    open_, strict = gate(0.0, ttft=2.0), gate(1.0, ttft=2.0)
    for _ in range(3):
        open_.check(CALL, EXPECTED, 100.0)
        refused(strict)
    assert open_.expected_late.at(100.0) == strict.expected_late.at(100.0) > 0.8
    assert open_.expected_late.at(100.0 + 10 * MEMORY_S) < 0.01, "an overload that has ended is forgotten"


def test_some_are_let_in_all_the_same_so_that_the_forecast_learns() -> None:
    admission = gate(ttft=2.0)
    for _ in range(2):
        for _ in range(TRIED_ONE_IN - 1):
            refused(admission)
        admission.check(CALL, EXPECTED, 100.0)


def test_where_the_median_keeps_the_target_more_are_let_in() -> None:
    """Otherwise a 90th percentile that one burst made large would keep an idle pool empty."""
    assert DOUBTED_ONE_IN < TRIED_ONE_IN
    doubted = gate(ttft=7.0)
    for _ in range(2):
        for _ in range(DOUBTED_ONE_IN - 1):
            refused(doubted)
        doubted.check(CALL, EXPECTED, 100.0)
    answers = gate(ttft=7.0, e2e=8.0)
    for _ in range(TRIED_ONE_IN - 1):
        refused(answers)


def test_it_counts_who_was_served_well_within_each_target() -> None:
    for took_s, is_good in (
        ({"ttft": 2.5, "e2e": 4.0}, True),
        ({"ttft": 2.5, "e2e": 4.1}, False),
        ({}, False),
    ):
        admission = gate(ttft=5.0, e2e=8.0)
        admission.ended(CALL, took_s, 100.0)
        assert (admission.in_good_time.at(100.0) > 0.5) == is_good
