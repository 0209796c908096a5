"""How are many measurements said in a few numbers?"""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest-rank percentile (`share` 0 to 1); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def within_factor(pairs: Sequence[tuple[float, float]], factor: float, floor: float) -> float | None:
    """Share of (estimate, actual) pairs that lie within `factor` of each other.

    Values below `floor` count as `floor`: nobody cares whether 2 ms were 5 ms.
    """
    if not pairs:
        return None
    good = 0
    for estimate, actual in pairs:
        low, high = sorted((max(estimate, floor), max(actual, floor)))
        good += high <= low * factor
    return good / len(pairs)


def covered(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Share of (upper estimate, actual) pairs where the actual stayed at or below the estimate."""
    if not pairs:
        return None
    return sum(actual <= estimate for estimate, actual in pairs) / len(pairs)


def jain_index(values: Sequence[float]) -> float | None:
    """Jain's fairness index: 1 when all are equal, 1/n when one has everything."""
    total = sum(values)
    squares = sum(value * value for value in values)
    return total * total / (len(values) * squares) if squares else None
