"""The ideal queue, on cases whose shares can be computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.explain.ideal_share import FairTerms, IdealShare
from gateway.explain.shares import TenantTier

FAIR = FairTerms()


def _ideal(*arrivals: tuple[str, int, float, FairTerms], at_s: float = 0.0) -> IdealShare:
    ideal = IdealShare()
    ideal.advance(0.0, {})
    for tenant, rank, cost, terms in arrivals:
        ideal.arrived(at_s, tenant, rank, cost, terms)
    return ideal


def test_the_flood_that_had_everything_was_due_half_of_it() -> None:
    ideal = _ideal(("flood", 1, 1000, FAIR), ("light", 1, 1000, FAIR))

    assert ideal.advance(1.0, {("flood", 1): 100}) == pytest.approx({("flood", 1): 50, ("light", 1): 50})


def test_a_tenant_is_due_no_more_than_it_asked_for() -> None:
    ideal = _ideal(("flood", 1, 1000, FAIR), ("light", 1, 20, FAIR))

    assert ideal.advance(1.0, {("flood", 1): 100}) == pytest.approx({("flood", 1): 80, ("light", 1): 20})
    # The light tenant still waits in the real queue: it is not due it twice.
    assert ideal.advance(2.0, {("flood", 1): 100}) == pytest.approx({("flood", 1): 100})


def test_weights_divide_a_tier_and_a_higher_tier_goes_first() -> None:
    ideal = _ideal(("a", 1, 1000, FairTerms(3.0)), ("b", 1, 1000, FAIR), ("paid", 0, 60, FAIR))

    due = ideal.advance(1.0, {("a", 1): 100})

    assert due == pytest.approx({("paid", 0): 60, ("a", 1): 30, ("b", 1): 10})


def test_a_reservation_goes_before_higher_tiers_and_does_not_shrink_the_share_of_the_rest() -> None:
    reserved = FairTerms(1.0, reserved_per_s=30.0)
    ideal = _ideal(("reserved", 2, 1000, reserved), ("paid", 0, 1000, FAIR))
    assert ideal.advance(1.0, {("paid", 0): 100}) == pytest.approx({("reserved", 2): 30, ("paid", 0): 70})

    ideal = _ideal(("reserved", 1, 1000, reserved), ("other", 1, 1000, FAIR))
    due = ideal.advance(1.0, {("other", 1): 100})
    assert due == pytest.approx({("reserved", 1): 30 + 35, ("other", 1): 35})


def test_a_reservation_is_for_its_tier_and_for_what_is_there() -> None:
    elsewhere = FairTerms(1.0, reserved_per_s=30.0, reserved_tier=0)
    ideal = _ideal(("reserved", 2, 1000, elsewhere), ("paid", 1, 1000, FAIR))
    assert ideal.advance(1.0, {("paid", 1): 100}) == pytest.approx({("paid", 1): 100})

    ideal = _ideal(("reserved", 1, 10, FairTerms(1.0, reserved_per_s=30.0)), ("paid", 0, 1000, FAIR))
    assert ideal.advance(1.0, {("paid", 0): 100}) == pytest.approx({("reserved", 1): 10, ("paid", 0): 90})


def test_what_came_half_way_is_due_nothing_of_the_first_half() -> None:
    ideal = _ideal(("early", 1, 1000, FAIR))
    ideal.arrived(0.5, "late", 1, 1000, FAIR)

    assert ideal.advance(1.0, {("early", 1): 100}) == pytest.approx({("early", 1): 75, ("late", 1): 25})


def test_service_before_anything_was_asked_for_goes_to_what_came() -> None:
    """The engine idled first: all of the second's service was given after the arrivals."""
    ideal = _ideal(("a", 1, 1000, FAIR), ("b", 1, 1000, FAIR), at_s=0.8)

    assert ideal.advance(1.0, {("a", 1): 100}) == pytest.approx({("a", 1): 50, ("b", 1): 50})


def test_a_request_that_was_shorter_than_predicted_gives_back_what_it_was_not_due() -> None:
    ideal = _ideal(("short", 1, 100, FAIR), ("long", 1, 1000, FAIR))
    assert ideal.advance(1.0, {("long", 1): 100}) == pytest.approx({("short", 1): 50, ("long", 1): 50})
    ideal.ended(1.5, "short", 1, predicted=100, cost=20)

    due = ideal.advance(2.0, {("long", 1): 80, ("short", 1): 20})

    assert due == pytest.approx({("short", 1): -30, ("long", 1): 130})


def test_a_request_that_was_longer_than_predicted_was_due_what_it_had() -> None:
    ideal = _ideal(("long", 1, 10, FAIR))
    assert ideal.advance(1.0, {("long", 1): 100}) == pytest.approx({("long", 1): 100})
    ideal.ended(1.5, "long", 1, predicted=10, cost=150)
    assert ideal.advance(2.0, {("long", 1): 50}) == pytest.approx({("long", 1): 50})


def test_once_nothing_is_open_nothing_is_left_for_anyone() -> None:
    ideal = _ideal(("a", 1, 100, FAIR))
    ideal.ended(0.5, "a", 1, predicted=100, cost=100)
    ideal.advance(1.0, {("a", 1): 60})  # the rest was never counted
    ideal.arrived(1.5, "b", 1, 1000, FAIR)

    assert ideal.advance(2.0, {("b", 1): 100}) == pytest.approx({("b", 1): 100})


def test_service_elsewhere_is_divided_as_well() -> None:
    ideal = _ideal(("here", 1, 1000, FAIR), ("there", 1, 1000, FAIR))

    due = ideal.advance(1.0, {("here", 1): 100}, elsewhere=300)

    assert due == pytest.approx({("here", 1): 200, ("there", 1): 200})


TENANTS = st.sampled_from("abcd")
RANKS = st.integers(0, 2)
COSTS = st.integers(1, 200)
EVENTS = st.one_of(
    st.tuples(st.just("arrives"), TENANTS, RANKS, COSTS, st.floats(0.0, 50.0)),
    st.tuples(st.just("ends"), st.integers(0, 50), COSTS),
    st.tuples(st.just("passes"), st.dictionaries(st.tuples(TENANTS, RANKS), st.integers(1, 300), max_size=4)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_shares_always_add_up_to_the_service(events: list[tuple]) -> None:  # type: ignore[type-arg]
    """Whatever comes, ends, was mistaken or was never announced."""
    ideal, now_s = IdealShare(), 0.0
    open_requests: list[tuple[str, int, int]] = []
    for event in events:
        now_s += 0.13
        match event:
            case ("arrives", tenant, rank, cost, reserved_per_s):
                ideal.arrived(now_s, tenant, rank, cost, FairTerms(1.0 + rank, reserved_per_s))
                open_requests.append((tenant, rank, cost))
            case ("ends", which, cost) if open_requests:
                tenant, rank, predicted = open_requests.pop(which % len(open_requests))
                ideal.ended(now_s, tenant, rank, predicted, cost)
            case ("passes", served):
                had: dict[TenantTier, int] = served
                due = ideal.advance(now_s, had)
                assert sum(due.values()) == pytest.approx(sum(had.values()), abs=1e-3)
