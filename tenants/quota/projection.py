"""Predicts when a limit will be used up, if use continues. Pure.

The median takes the mean of two rates: the window so far, and the last hour or two. The 90th percentile takes
the slower one, and the randomness of requests: Poisson arrivals with exponential sizes. An instant beyond the
window's end is none: then the amount is new.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

HORIZON_S = 366 * 86_400
"""Nothing is said of what is further off."""
SIZE_SPREAD = math.sqrt(2)
"""Standard deviation of the use of one arrival interval and size, over the mean: exponential sizes."""
Z90 = 1.2816
"""The 90th percentile of the normal distribution."""
LEAST_OBSERVED_S = 60.0
"""Shorter observations say nothing of a rate."""


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
    seen = [each for each in observed if each.seconds >= LEAST_OBSERVED_S]
    if not seen:
        return Exhaustion(None, None, "nothing is known of its use for a minute or longer")
    said = "; ".join(f"{each.what} ({_time(each.seconds)}): {each.per_s:.4g} a second" for each in seen)
    middle = sum(each.per_s for each in seen) / len(seen)
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
    counted = [(each.requests, each.amount) for each in seen if each.requests]
    if not counted:
        return None
    requests, amount = max(counted)
    size = amount / requests
    # Of the rate, which is known from so many requests, and of those that are still to come.
    spread = SIZE_SPREAD * math.sqrt(1 / requests + size / left)
    slower = min(each.per_s for each in seen)
    by_rate_s = left / slower if slower > 0 else math.inf
    return max(by_rate_s, left / middle * (1 + Z90 * spread))


def _within(instant_s: float | None, most_s: float) -> float | None:
    return None if instant_s is None or instant_s > most_s else instant_s


def _time(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} seconds"
