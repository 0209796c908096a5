"""The projection by the hours of past weeks: pure, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from tenants.quota.projection import HOUR_S, HOUR_US, WEEK_HOURS, exhaustion_by_week, weeks_of, whole_weeks

NOW_US = 500_000 * HOUR_US
"""The beginning of an hour."""


def test_equal_weeks_use_a_limit_up_at_one_instant() -> None:
    weeks = [[10] * WEEK_HOURS] * 4
    found = exhaustion_by_week(25, weeks, NOW_US)
    assert (found.p50_s, found.p90_s) == (2.5 * HOUR_S, 2.5 * HOUR_S)
    assert "4 weeks" in found.basis
    assert "1,680 a week" in found.basis


def test_the_hour_of_the_week_counts_and_not_the_mean() -> None:
    night_only = [0] * 10 + [100] + [0] * (WEEK_HOURS - 11)
    found = exhaustion_by_week(50, [night_only] * 3, NOW_US)
    assert found.p50_s == 10.5 * HOUR_S
    later = exhaustion_by_week(150, [night_only] * 3, NOW_US)
    assert later.p50_s == (WEEK_HOURS + 10.5) * HOUR_S


def test_the_rest_of_the_current_hour_counts_in_part() -> None:
    found = exhaustion_by_week(10, [[20] * WEEK_HOURS] * 2, NOW_US + 3 * HOUR_US // 4)
    assert found.p50_s == pytest.approx(0.25 * HOUR_S + 0.25 * HOUR_S)


def test_weeks_that_differ_give_a_range() -> None:
    weeks = [[each] * WEEK_HOURS for each in (8, 10, 12, 10)]
    found = exhaustion_by_week(100, weeks, NOW_US)
    # Mean 10 an hour; standard deviation of the weeks sqrt(8/3), times 1.638 * sqrt(5/4).
    slow = 10 - 1.638 * math.sqrt(5 / 4) * math.sqrt(8 / 3)
    assert found.p50_s == pytest.approx(10 * HOUR_S)
    assert found.p90_s == pytest.approx(100 / slow * HOUR_S)
    assert found.p50_s < found.p90_s


def test_what_lies_beyond_the_window_is_not_said() -> None:
    weeks = [[each] * WEEK_HOURS for each in (5, 15)]
    found = exhaustion_by_week(100, weeks, NOW_US, 12 * HOUR_S)
    assert found.p50_s == pytest.approx(10 * HOUR_S)
    assert found.p90_s is None
    none = exhaustion_by_week(100, weeks, NOW_US, 9 * HOUR_S)
    assert (none.p50_s, none.p90_s) == (None, None)
    assert none.basis.endswith("not before the window turns")
    never = exhaustion_by_week(10**12, weeks, NOW_US)
    assert never.basis.endswith("not within a year")


def test_too_little_history_is_said_and_not_guessed() -> None:
    found = exhaustion_by_week(10, [[100] * WEEK_HOURS], NOW_US)
    assert (found.p50_s, found.p90_s) == (None, None)
    assert found.basis == "too little history: 1 of 2 whole weeks that it needs"
    assert exhaustion_by_week(0, [], NOW_US).p90_s == 0.0


def test_unused_weeks_use_nothing_up() -> None:
    found = exhaustion_by_week(1, [[0] * WEEK_HOURS] * 4, NOW_US, 3_600.0)
    assert (found.p50_s, found.p90_s) == (None, None)


def test_weeks_are_whole_and_end_before_the_current_hour() -> None:
    now_us = NOW_US + 7
    by_hour = {
        NOW_US: 1_000_000,  # the current hour, which is not over
        NOW_US - HOUR_US: 3,
        NOW_US - WEEK_HOURS * HOUR_US: 5,
        NOW_US - (WEEK_HOURS + 1) * HOUR_US: 7,
    }
    newest, before = weeks_of(by_hour, now_us, 2)
    assert (newest[0], newest[-1], sum(newest)) == (5, 3, 8)
    assert (before[-1], sum(before)) == (7, 7)
    assert whole_weeks(NOW_US - WEEK_HOURS * HOUR_US, now_us) == 1
    assert whole_weeks(NOW_US - WEEK_HOURS * HOUR_US + 1, now_us) == 0
    assert whole_weeks(0, now_us) == 4
