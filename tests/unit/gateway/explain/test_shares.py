"""Shares of recent service: what a tenant had of its tier, against weighted max-min."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.explain.shares import HALF_LIFE_S, ShareMeter, shares_of
from gateway.flow.tenant_stats import TenantFlow

STANDARD, BATCH = 1, 2


def flow(tenant_id: str, weight: float = 1.0, *, queued: int = 0, rank: int = STANDARD) -> TenantFlow:
    made = TenantFlow(tenant_id, weight)
    made.queued[rank] = queued
    return made


def serve(meter: ShareMeter, flows: list[TenantFlow], *costs: int, rank: int = STANDARD) -> None:
    """A second in which each tenant had so much."""
    meter.sample(0.0, flows)
    for each, cost in zip(flows, costs, strict=True):
        each.served[rank] += cost
    meter.sample(1.0, flows)


def test_those_that_wait_are_due_service_by_weight() -> None:
    meter = ShareMeter()
    serve(meter, [flow("light", queued=5), flow("heavy", 3.0, queued=5)], 500, 500)
    found = shares_of([meter])
    assert found["light", STANDARD] == pytest.approx((0.5, 0.25))
    assert found["heavy", STANDARD] == pytest.approx((0.5, 0.75))


def test_a_tenant_that_does_not_wait_is_due_no_more_than_it_had() -> None:
    meter = ShareMeter()
    serve(meter, [flow("modest", 9.0), flow("flood", queued=5)], 100, 900)
    found = shares_of([meter])
    assert found["modest", STANDARD] == pytest.approx((0.1, 0.1))
    assert found["flood", STANDARD] == pytest.approx((0.9, 0.9))


def test_a_starved_tenant_shows_and_each_tier_is_divided_by_itself() -> None:
    meter = ShareMeter()
    starved, other = flow("starved", queued=1), flow("other", queued=1)
    batch = flow("batch", rank=BATCH)
    serve(meter, [starved, other, batch], 0, 600, 0)
    batch.served[BATCH] += 100
    meter.sample(2.0, [starved, other, batch])
    found = shares_of([meter])
    assert found["starved", STANDARD] == pytest.approx((0.0, 0.5))
    assert found["other", STANDARD] == pytest.approx((1.0, 0.5))
    assert found["batch", BATCH] == pytest.approx((1.0, 1.0))


def test_what_was_had_is_forgotten_by_half_and_then_altogether() -> None:
    meter = ShareMeter()
    flows = [flow("then"), flow("now")]
    serve(meter, flows, 1_000, 0)
    flows[1].served[STANDARD] += 500
    meter.sample(1.0 + HALF_LIFE_S, flows)
    assert shares_of([meter])["then", STANDARD] == pytest.approx((0.5, 0.5))
    meter.sample(1.0 + 20 * HALF_LIFE_S, flows)
    assert meter.recent == {}


def test_models_are_added_up() -> None:
    first, second = ShareMeter(), ShareMeter()
    serve(first, [flow("acme", queued=1), flow("globex", queued=1)], 300, 100)
    serve(second, [flow("acme")], 600)
    assert shares_of([first, second])["acme", STANDARD] == pytest.approx((0.9, 0.8))


def test_a_tenant_whose_counts_were_forgotten_begins_anew() -> None:
    meter = ShareMeter()
    serve(meter, [flow("acme")], 900)
    meter.sample(2.0, [])
    again = flow("acme")
    again.served[STANDARD] = 40
    meter.sample(3.0, [again])
    assert meter.recent["acme", STANDARD].had == pytest.approx(900 * 0.5 ** (2 / HALF_LIFE_S) + 40)


SECOND = st.tuples(st.integers(0, 3), st.integers(0, 1_000))
"""What waits, and what is served."""


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0.01, 100.0), min_size=3, max_size=3),
    st.lists(st.tuples(SECOND, SECOND, SECOND), max_size=12),
)
def test_what_is_due_adds_up_to_what_was_had(
    weights: list[float], seconds: list[tuple[tuple[int, int], ...]]
) -> None:
    flows = [flow(f"t{index}", weight) for index, weight in enumerate(weights)]
    meter = ShareMeter()
    meter.sample(0.0, flows)
    for now, second in enumerate(seconds, start=1):
        for each, (queued, cost) in zip(flows, second, strict=True):
            each.queued[STANDARD] = queued
            each.served[STANDARD] += cost
        meter.sample(now / 1_000, flows)
    had = sum(share.had for share in meter.recent.values())
    # A tenant with less than half a token is left out of either sum.
    assert sum(share.due for share in meter.recent.values()) == pytest.approx(had, abs=len(flows) * 12)
    assert all(0 <= had_share <= 1 + 1e-9 for had_share, _ in shares_of([meter]).values())
