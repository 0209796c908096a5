"""Tests of the ideal fair shares: max-min, by weight."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.demo.shares import TenantArrival, ideal_shares, under_share, water_fill
from ops.reporting import jain_index, quantile
from ops.simulate.figures.figures import covered, within_factor

names = st.sampled_from(list("abcdef"))


@settings(max_examples=60)
@given(st.floats(0, 100), st.dictionaries(names, st.tuples(st.floats(0, 50), st.floats(0.1, 8)), min_size=1))
def test_water_filling_gives_all_it_has_and_is_max_min(
    amount: float, tenants: dict[str, tuple[float, float]]
) -> None:
    demands = {name: demand for name, (demand, _) in tenants.items()}
    weights = {name: weight for name, (_, weight) in tenants.items()}
    given_out = water_fill(amount, demands, weights)
    assert sum(given_out.values()) == pytest.approx(min(amount, sum(demands.values())), abs=1e-6)
    for name, part in given_out.items():
        assert part <= demands[name] + 1e-6
        if part < demands[name] - 1e-6:  # an unsatisfied tenant has the highest level of all
            level = part / weights[name]
            assert all(given_out[other] / weights[other] <= level + 1e-6 for other in given_out)


def test_backlogged_tenants_share_by_weight_and_a_small_one_gets_what_it_asked() -> None:
    arrivals = [TenantArrival(0, "a", 1000), TenantArrival(0, "b", 1000), TenantArrival(0, "small", 10)]
    weights = {"a": 1.0, "b": 3.0, "small": 1.0}
    ideal = ideal_shares(arrivals, [(0.0, 0.0), (1.0, 100.0), (2.0, 410.0)], weights)
    assert ideal.service == pytest.approx({"a": 100, "b": 300, "small": 10})
    assert under_share(ideal, weights, 410) == {"small"}


def test_one_who_comes_late_gets_no_credit_for_the_time_before() -> None:
    arrivals = [TenantArrival(0, "early", 1000), TenantArrival(1.5, "late", 1000)]
    ideal = ideal_shares(arrivals, [(0.0, 0.0), (1.0, 100.0), (2.0, 200.0)], {"early": 1, "late": 1})
    assert ideal.service == pytest.approx({"early": 150, "late": 50})


def test_the_few_numbers_say_what_they_claim() -> None:
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile(list(range(1, 101)), 0.99) == 99
    assert math.isnan(quantile([], 0.5))
    assert within_factor([(1, 2), (1, 2.1), (0.001, 0.01)], 2, floor=0.05) == pytest.approx(2 / 3)
    assert covered([(1, 1), (1, 2)]) == 0.5
    assert jain_index([1, 1, 1, 1]) == pytest.approx(1)
    assert jain_index([1, 0, 0, 0]) == pytest.approx(0.25)


def test_service_that_was_counted_before_its_demand_was_seen_is_not_lost() -> None:
    """Readings are not simultaneous: one may hold service of requests whose arrival comes with the next."""
    arrivals = [TenantArrival(0.5, "a", 10), TenantArrival(1.5, "b", 100)]
    ideal = ideal_shares(arrivals, [(0.0, 0.0), (1.0, 30.0), (2.0, 110.0)], {"a": 1, "b": 1})
    assert ideal.service == pytest.approx({"a": 10, "b": 100})
