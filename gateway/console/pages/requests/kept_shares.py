"""How often stated figures held: shares with Wilson's 95 % interval. Pure.

E. B. Wilson, Probable Inference, the Law of Succession, and Statistical Inference, JASA 22 (1927): stays
within 0 and 1, and holds for few requests and shares near 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FEWEST = 30
"""Below this no share is shown: around a half its interval is a third of the scale."""
Z_95 = 1.959964
Point = tuple[float, float, float, float]
"""Stated share, observed share and its interval."""


def wilson(within: int, requests: int, z: float = Z_95) -> tuple[float, float]:
    """The interval of a share of at least one request."""
    share = within / requests
    middle = share + z * z / (2 * requests)
    half = z * math.sqrt(share * (1 - share) / requests + z * z / (4 * requests * requests))
    whole = 1 + z * z / requests
    return max(0.0, (middle - half) / whole), min(1.0, (middle + half) / whole)


@dataclass(frozen=True)
class KeptShare:
    """How many requests stayed within a stated figure."""

    told: float
    """The share that should: 0.5 or 0.9."""
    within: int
    requests: int

    @property
    def is_enough(self) -> bool:
        return self.requests >= FEWEST

    @property
    def share(self) -> float:
        return self.within / self.requests

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.within, self.requests)

    @property
    def point(self) -> Point:
        return (self.told, self.share, *self.interval)


@dataclass(frozen=True)
class KeptFigure:
    p50: KeptShare
    p90: KeptShare

    @property
    def requests(self) -> int:
        return self.p50.requests

    @property
    def points(self) -> list[Point]:
        return [share.point for share in (self.p50, self.p90) if share.is_enough]


def kept_figure(row: Mapping[str, Any]) -> KeptFigure:
    requests = row["requests"]
    return KeptFigure(
        KeptShare(0.5, row["within_p50"], requests), KeptShare(0.9, row["within_p90"], requests)
    )
