"""Ageing: raises a request's effective tier with its wait.

Tiers are strict, so a lower one would starve under an endless stream of higher ones. A request's *effective*
tier is its own less one for every full `ageing_s` of its tier that it has waited, and never below 0. It is
priced and reported in its own tier. Pure: time is passed in.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def effective_tier(tier: int, arrived_s: float, now_s: float, ageing_s: Sequence[float]) -> int:
    """The band of a request at `now_s`; `ageing_s` by tier, infinite: it never ages."""
    effective = tier
    while effective > 0 and _moves_up_s(tier, effective, arrived_s, ageing_s) <= now_s:
        effective -= 1
    return effective


def _moves_up_s(tier: int, effective: int, arrived_s: float, ageing_s: Sequence[float]) -> float:
    """When it leaves band `effective` for the one above."""
    return arrived_s + (tier - effective + 1) * ageing_s[tier]


class Ageing:
    """Waiting requests by when they move up next. O(log n) a change."""

    def __init__(self, ageing_s: Sequence[float]) -> None:
        if any(not seconds > 0 for seconds in ageing_s):
            raise ValueError(f"ageing_s must be greater than 0 (inf: never) for every tier, not {ageing_s}")
        self.ageing_s = tuple(ageing_s)
        self._heap: list[tuple[float, str]] = []
        self._due_s: dict[str, float] = {}

    def add(self, entry_id: str, tier: int, effective: int, arrived_s: float) -> None:
        """Watches a request of `tier` that waits in band `effective`; replaces an earlier watch."""
        self._due_s.pop(entry_id, None)
        due_s = _moves_up_s(tier, effective, arrived_s, self.ageing_s) if effective > 0 else math.inf
        if due_s < math.inf:
            self._due_s[entry_id] = due_s
            heapq.heappush(self._heap, (due_s, entry_id))
        if len(self._heap) > 2 * len(self._due_s) + 64:
            self._heap = [(at_s, entry_id) for entry_id, at_s in self._due_s.items()]
            heapq.heapify(self._heap)

    def remove(self, entry_id: str) -> None:
        self._due_s.pop(entry_id, None)

    def due(self, now_s: float) -> list[str]:
        """Removes and returns the requests that are due to move up, longest due first."""
        due: list[str] = []
        while self._heap and self._heap[0][0] <= now_s:
            at_s, entry_id = heapq.heappop(self._heap)
            if self._due_s.get(entry_id) == at_s:
                del self._due_s[entry_id]
                due.append(entry_id)
        return due
