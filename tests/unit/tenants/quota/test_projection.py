"""When a limit will be used up."""

from __future__ import annotations

import math
import random

import pytest

from tenants.quota.projection import HORIZON_S, ObservedUse, projected_exhaustion

HOUR = 3_600.0
DAY = 86_400.0


def use(amount: int, seconds: float, requests: int | None = 100) -> ObservedUse:
    return ObservedUse("of this window", amount, seconds, requests)


def test_the_median_takes_the_mean_of_both_rates_and_p90_at_least_the_slower_one() -> None:
    found = projected_exhaustion(3_600, [use(3_600, HOUR, 10**6), use(7_200, 2 * HOUR, 10**6)])
    assert found.p50_s == pytest.approx(3_600)
    both = projected_exhaustion(300_000, [use(3_600, HOUR, 3_600), use(3 * 3_600, HOUR, 3 * 3_600)])
    assert both.p50_s == pytest.approx(150_000)
    assert both.p90_s == pytest.approx(300_000)
    assert "of this window (60 minutes): 1 a second; of this window (60 minutes): 3 a second" in both.basis


def test_what_is_used_up_is_so_now_and_what_is_unused_never() -> None:
    spent = projected_exhaustion(0, [use(10, HOUR)])
    assert (spent.p50_s, spent.p90_s, spent.basis) == (0.0, 0.0, "it is used up")
    assert projected_exhaustion(-5, []).p50_s == 0.0
    unused = projected_exhaustion(10, [use(0, HOUR, 0), use(0, DAY, 0)])
    assert (unused.p50_s, unused.p90_s) == (None, None)
    assert unused.basis.startswith("it is not being used")


def test_a_short_time_says_nothing() -> None:
    found = projected_exhaustion(10, [use(1_000, 59.9)])
    assert (found.p50_s, found.p90_s) == (None, None)
    assert "a minute or longer" in found.basis
    with_more = projected_exhaustion(1_000, [use(1_000_000, 59.9), use(3_600, HOUR)])
    assert with_more.p50_s == pytest.approx(1_000)


def test_nothing_is_said_beyond_the_window_nor_beyond_a_year() -> None:
    soon = projected_exhaustion(3_600, [use(3_600, HOUR, 10**6)], window_ends_in_s=3_600.5)
    assert (soon.p50_s, soon.p90_s) == (pytest.approx(3_600), None), "perhaps not in this window"
    later = projected_exhaustion(3_600, [use(3_600, HOUR)], window_ends_in_s=3_599)
    assert (later.p50_s, later.p90_s) == (None, None)
    assert later.basis.endswith("not before the window turns")
    far = projected_exhaustion(HORIZON_S * 2, [use(3_600, HOUR)])
    assert far.p50_s is None
    assert far.basis.endswith("not within a year")


def test_without_the_number_of_requests_there_is_no_p90() -> None:
    found = projected_exhaustion(3_600, [use(3_600, HOUR, None)])
    assert (found.p50_s, found.p90_s) == (pytest.approx(3_600), None)
    assert "no p90: the number of requests is not known" in found.basis


def test_use_that_came_before_this_hour_and_stopped_has_no_p90() -> None:
    found = projected_exhaustion(3_600, [use(3_600, HOUR), use(0, HOUR, 0)])
    assert (found.p50_s, found.p90_s) == (pytest.approx(7_200), None)


@pytest.mark.parametrize(("seen", "ahead"), [(30, 30), (100, 400), (1_000, 100)])
def test_the_percentiles_hold_where_requests_come_at_random(seen: int, ahead: int) -> None:
    """`seen` requests are expected in the time that is known, and `ahead` use up the rest."""
    draw = random.Random(7)
    within_p50 = within_p90 = 0
    rounds = 1_500
    for _ in range(rounds):
        amount = requests = 0
        at_s = draw.expovariate(1.0)
        while at_s < seen * 1.0:
            amount, requests = amount + round(draw.expovariate(1e-6)), requests + 1
            at_s += draw.expovariate(1.0)
        left, past_s = round(ahead * 1e6), 0.0
        found = projected_exhaustion(left, [use(amount, seen * 60.0, requests)])
        while left > 0:
            past_s += 60 * draw.expovariate(1.0)
            left -= round(draw.expovariate(1e-6))
        assert found.p50_s is not None
        assert found.p90_s is not None
        within_p50 += past_s <= found.p50_s
        within_p90 += past_s <= found.p90_s
    assert 0.42 <= within_p50 / rounds <= 0.58
    assert 0.86 <= within_p90 / rounds <= 0.95
    assert not math.isnan(found.p90_s or 0.0)
