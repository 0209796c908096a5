"""Predicts when a limit will be used up, if use continues. Pure.

The median takes the mean of two rates: the window so far, and the last hour or two. The 90th percentile takes
the slower one, and the randomness of requests: Poisson arrivals with exponential sizes. An instant beyond the
window's end is none: then the amount is new.

With whole weeks of history each of them is replayed hour by hour. The median is where the mean of these
replays uses the limit up; the 90th percentile is where also a slow week has: the lower prediction bound of
the sum so far, by Student's t over the weeks, since a week's hours may all be low together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HORIZON_S = 366 * 86_400
"""Nothing is said of what is further off."""
SIZE_SPREAD = math.sqrt(2)
"""Standard deviation of the use of one arrival interval and size, over the mean: exponential sizes."""
Z90 = 1.2816
"""The 90th percentile of the normal distribution."""
LEAST_OBSERVED_S = 60.0
"""Shorter observations say nothing of a rate."""
HOUR_S = 3_600
HOUR_US = HOUR_S * 1_000_000
WEEK_HOURS = 168
MOST_WEEKS = 4
LEAST_WEEKS = 2
T90 = {2: 3.078, 3: 1.886, 4: 1.638}
"""One-sided 90th percentile of Student's t, by number of weeks (degrees of freedom: one less)."""
Week = Sequence[int]
"""Use of the hours of a past week, in the order in which the coming hours follow."""


@dataclass(frozen=True, slots=True)
class ObservedUse:
    what: str
    """As the basis calls it."""
    amount: int
    seconds: float
    requests: int | None = None
    """None: not known."""

    @property
    def per_s(self) -> float:
        return self.amount / self.seconds


@dataclass(frozen=True, slots=True)
class Exhaustion:
    """Seconds from now until a limit is used up. None: not before the window turns, or not known."""

    p50_s: float | None
    p90_s: float | None
    basis: str


def projected_exhaustion(
    left: int, observed: Sequence[ObservedUse], window_ends_in_s: float = math.inf
) -> Exhaustion:
    """`left`: units that are neither used nor held; `observed` may overlap."""
    if left <= 0:
        return Exhaustion(0.0, 0.0, "it is used up")
    seen = [use for use in observed if use.seconds >= LEAST_OBSERVED_S]
    if not seen:
        return Exhaustion(None, None, "nothing is known of its use for a minute or longer")
    said = "; ".join(f"{use.what} ({_time(use.seconds)}): {use.per_s:.4g} a second" for use in seen)
    middle = sum(use.per_s for use in seen) / len(seen)
    if middle <= 0:
        return Exhaustion(None, None, f"it is not being used: {said}")
    p50_s, p90_s = left / middle, _p90_s(left, middle, seen)
    about = f"if use goes on as it did: {said}; p50 at the mean of the rates"
    about += (
        ", p90 at the slower one, or later by chance"
        if p90_s is not None
        else (", no p90: the number of requests is not known")
    )
    most_s = min(window_ends_in_s, HORIZON_S)
    if p50_s > most_s:
        about += "; not before the window turns" if most_s < HORIZON_S else "; not within a year"
    return Exhaustion(_within(p50_s, most_s), _within(p90_s, most_s), about)


def _p90_s(left: int, middle: float, seen: Sequence[ObservedUse]) -> float | None:
    """None: the number of requests is not known."""
    counted = [(use.requests, use.amount) for use in seen if use.requests]
    if not counted:
        return None
    requests, amount = max(counted)
    size = amount / requests
    # Of the rate, which is known from so many requests, and of those that are still to come.
    spread = SIZE_SPREAD * math.sqrt(1 / requests + size / left)
    slower = min(use.per_s for use in seen)
    by_rate_s = left / slower if slower > 0 else math.inf
    return max(by_rate_s, left / middle * (1 + Z90 * spread))


def _within(instant_s: float | None, most_s: float) -> float | None:
    return None if instant_s is None or instant_s > most_s else instant_s


def _time(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} seconds"


def whole_weeks(since_us: int, now_us: int) -> int:
    """Whole weeks known before the current hour, at most `MOST_WEEKS`."""
    hours = now_us // HOUR_US - -(-since_us // HOUR_US)
    return max(0, min(MOST_WEEKS, hours // WEEK_HOURS))


def weeks_of(use_by_hour: Mapping[int, int], now_us: int, weeks: int) -> list[Week]:
    """Whole weeks before the current hour, newest first. `use_by_hour`: by start (microseconds)."""
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
        low = middle - wide * math.sqrt(sum((total - middle) ** 2 for total in sums) / (count - 1))
        if p50_s is None and middle >= left:
            p50_s = at_s + span_s * (left - middle_before) / (middle - middle_before)
        if low >= left:
            p90_s = at_s + span_s * (left - low_before) / (low - low_before)
            return _within(p50_s, most_s), _within(p90_s, most_s)
        middle_before, low_before = middle, low
        at_s, hour = at_s + span_s, hour + 1
    return _within(p50_s, most_s), None
