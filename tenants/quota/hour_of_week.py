"""Predicts when a limit will be used up if the coming hours are used as those of the last weeks were. Pure.

Each of the last weeks is replayed hour by hour. The median is where the mean of these replays uses the limit
up; the 90th percentile is where also a slow week has: the lower prediction bound of the sum so far, by
Student's t over the weeks, since a week's hours may all be low together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tenants.quota.projection import HORIZON_S, Exhaustion

HOUR_S = 3_600
HOUR_US = HOUR_S * 1_000_000
WEEK_HOURS = 168
MOST_WEEKS = 4
LEAST_WEEKS = 2
T90 = {2: 3.078, 3: 1.886, 4: 1.638}
"""One-sided 90th percentile of Student's t, by number of weeks (degrees of freedom: one less)."""

Week = Sequence[int]
"""Use of the hours of a past week, in the order in which the coming hours follow."""


def whole_weeks(since_us: int, now_us: int) -> int:
    """Whole weeks known before the current hour, at most `MOST_WEEKS`."""
    hours = now_us // HOUR_US - -(-since_us // HOUR_US)
    return max(0, min(MOST_WEEKS, hours // WEEK_HOURS))


def weeks_of(use_by_hour: Mapping[int, int], now_us: int, weeks: int) -> list[Week]:
    """The last whole weeks before the current hour, newest first. `use_by_hour`: by the hour's start in
    microseconds; a missing hour had no use."""
    this_hour_us = now_us // HOUR_US * HOUR_US
    return [
        [
            use_by_hour.get(this_hour_us + (hour - back * WEEK_HOURS) * HOUR_US, 0)
            for hour in range(WEEK_HOURS)
        ]
        for back in range(1, weeks + 1)
    ]


def exhaustion_by_week(
    left: int, weeks: Sequence[Week], now_us: int, window_ends_in_s: float = math.inf
) -> Exhaustion:
    """`left`: units that are neither used nor held."""
    if left <= 0:
        return Exhaustion(0.0, 0.0, "it is used up")
    if len(weeks) < LEAST_WEEKS:
        have = f"{len(weeks)} of {LEAST_WEEKS} whole weeks"
        return Exhaustion(None, None, f"too little history: {have} that it needs")
    most_s = min(window_ends_in_s, HORIZON_S)
    mean_week = sum(map(sum, weeks)) / len(weeks)
    basis = f"the last {len(weeks)} weeks, hour of the week by hour of the week: {mean_week:,.0f} a week"
    p50_s = p90_s = None
    # No walk through a year where even one more week than there is room for would not do.
    if mean_week * (most_s / (WEEK_HOURS * HOUR_S) + 1) >= left:
        p50_s, p90_s = _crossings(left, weeks, now_us, most_s)
    if p50_s is None:
        basis += "; not before the window turns" if most_s < HORIZON_S else "; not within a year"
    return Exhaustion(p50_s, p90_s, basis)


def _crossings(
    left: int, weeks: Sequence[Week], now_us: int, most_s: float
) -> tuple[float | None, float | None]:
    """Seconds until the mean and the lower bound of the replayed sums reach `left`; None: not in time."""
    count = len(weeks)
    wide = T90[count] * math.sqrt(1 + 1 / count)
    sums = [0.0] * count
    at_s, hour = 0.0, 0
    middle_before = low_before = 0.0
    p50_s: float | None = None
    into_hour_s = now_us % HOUR_US / 1e6
    while at_s < most_s:
        span_s = HOUR_S - into_hour_s
        part, into_hour_s = span_s / HOUR_S, 0.0
        for place, week in enumerate(weeks):
            sums[place] += part * week[hour % WEEK_HOURS]
        middle = sum(sums) / count
        low = middle - wide * math.sqrt(sum((each - middle) ** 2 for each in sums) / (count - 1))
        if p50_s is None and middle >= left:
            p50_s = at_s + span_s * (left - middle_before) / (middle - middle_before)
        if low >= left:
            p90_s = at_s + span_s * (left - low_before) / (low - low_before)
            return _within(p50_s, most_s), _within(p90_s, most_s)
        middle_before, low_before = middle, low
        at_s, hour = at_s + span_s, hour + 1
    return _within(p50_s, most_s), None


def _within(instant_s: float | None, most_s: float) -> float | None:
    return None if instant_s is None or instant_s > most_s else instant_s
