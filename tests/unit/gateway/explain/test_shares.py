"""Shares of recent service: what a tenant had of its tier, against weighted max-min."""

from __future__ import annotations

import pytest

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
