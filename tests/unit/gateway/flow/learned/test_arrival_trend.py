"""The trend of arrivals: what it says, when it says nothing, and that it keeps little."""

from __future__ import annotations

import pytest

from gateway.flow.learned.switch import LEAST_ARRIVALS, LONG_S, SHORT_S, ArrivalTrend


def arrivals(trend: ArrivalTrend, begin_s: int, end_s: int, a_second: int) -> None:
    for second in range(begin_s, end_s):
        for turn in range(a_second):
            trend.arrived(second + turn / a_second)


def test_steady_rising_and_falling() -> None:
    trend = ArrivalTrend()
    arrivals(trend, 0, 90, 2)
    assert trend.value(90.0) == 1.0
    arrivals(trend, 90, 100, 8)
    assert trend.value(100.0) == pytest.approx(8 / ((50 * 2 + 10 * 8) / 60))
    assert trend.value(110.0) == 0.0, "no more came"


def test_too_little_to_tell_is_steady() -> None:
    assert ArrivalTrend().value(5.0) == 1.0
    young, few = ArrivalTrend(), ArrivalTrend()
    arrivals(young, 0, 2 * SHORT_S - 1, 5)
    assert young.value(2 * SHORT_S - 1) == 1.0
    arrivals(young, 2 * SHORT_S - 1, 2 * SHORT_S, 50)
    assert young.value(2 * SHORT_S) > 1.0
    for turn in range(LEAST_ARRIVALS - 1):
        few.arrived(50.0 + turn)
    assert few.value(70.0) == 1.0
    few.arrived(70.0)
    assert few.value(71.0) != 1.0


def test_the_time_before_the_first_arrival_is_not_compared_with() -> None:
    trend = ArrivalTrend()
    arrivals(trend, 1000, 1030, 3)
    assert trend.value(1030.0) == 1.0


def test_the_present_second_counts_once_it_is_over_and_memory_is_bounded() -> None:
    trend = ArrivalTrend()
    arrivals(trend, 0, 60, 1)
    before = trend.value(60.0)
    for _ in range(1000):
        trend.arrived(60.5)
    assert trend.value(60.9) == before
    assert trend.value(61.0) > 5
    arrivals(trend, 61, 1000, 1)
    assert len(trend._seconds) <= LONG_S + 1
