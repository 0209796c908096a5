"""Tests of the demo's trace: the slice, and what scaling keeps."""

from __future__ import annotations

from collections import Counter

import pytest

from ops.demo.cast import CAST, planned_tokens
from ops.demo.trace import MAX_OUTPUT_TOKENS, load_slice, plan, scale_lengths, thin


def test_the_slice_has_all_tenants_in_order_of_arrival() -> None:
    trace = load_slice()
    assert len(trace) == 1500
    assert {request.tenant for request in trace} == {tenant.name for tenant in CAST}
    assert [request.arrival_s for request in trace] == sorted(request.arrival_s for request in trace)


def test_scaled_answers_stay_within_what_the_model_can_end_by_itself() -> None:
    scaled = scale_lengths(load_slice(), 0.9)
    assert max(request.output_tokens for request in scaled) == MAX_OUTPUT_TOKENS
    assert min(request.output_tokens for request in scaled) >= 2


@pytest.mark.parametrize("share", [0.07, 0.3, 0.5, 0.99, 1.0])
def test_thinning_keeps_every_tenant_and_its_part(share: float) -> None:
    trace = load_slice()
    before, after = (Counter(request.tenant for request in part) for part in (trace, thin(trace, share)))
    assert before.keys() == after.keys()
    for tenant, number in after.items():
        assert number >= 1
        assert abs(number - before[tenant] * share) <= 1


@pytest.mark.parametrize("capacity", [300.0, 1500.0, 4000.0, 30_000.0])
def test_the_plan_offers_the_load_it_was_asked_for_on_slow_and_fast_machines(capacity: float) -> None:
    replay = plan(load_slice(), capacity_cost_per_s=capacity, overload=1.45, span_s=75)
    offered = sum(request.cost for request in replay.requests) / 75 / capacity
    assert offered == pytest.approx(1.45, rel=0.12)
    assert replay.offered_load == pytest.approx(offered)
    assert max(request.arrival_s for request in replay.requests) <= 75
    arrivals = [request.arrival_s for request in replay.requests]
    assert arrivals == sorted(arrivals)
    assert all(tokens > 0 for tokens in planned_tokens(replay.requests).values())
