"""Requests that wait longer than they were told: each teaches that then, not when it ends.

Of a figure that would come later than a told quantile all that is known is that this is a miss (censoring).
It teaches once, as soon as it is a miss of what is told today as well, so that many who wait together do not
all push the same way; how the request ends moves that quantile no more. Pure: time is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from engine.forecast.calibration import QUANTILES, Calibration, Miss, What, figure
from gateway.domain.estimate import Estimate, Promise

WHATS: tuple[What, ...] = ("wait", "ttft", "e2e")
AGAIN_S, AGAIN = 1.0, 0.1
"""A miss of what was told then that is none of what is told today is looked at again: after a second, or so
much of its wait."""


@dataclass(slots=True)
class WatchedWait:
    request_id: str
    promise: Promise
    arrived_s: float
    taught: set[Miss] = field(default_factory=set)


class Overdue:
    """One writer: the estimator."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Miss, WatchedWait]] = []
        self._serials = count()

    def add(self, request_id: str, estimate: Estimate, promise: Promise, arrived_s: float) -> WatchedWait:
        waiting = WatchedWait(request_id, promise, arrived_s)
        for what in WHATS:
            for index in range(len(QUANTILES)):
                self._look_at(arrived_s + figure(estimate, what)[index], (what, index), waiting)
        return waiting

    def look(self, now_s: float, waits: Callable[[WatchedWait], bool], calibration: Calibration) -> None:
        """Those whose told times have passed, if they still wait, teach."""
        while self._due and self._due[0][0] < now_s:
            _, _, miss, waiting = heappop(self._due)
            if not waits(waiting):
                continue
            promise, waited_s = waiting.promise, now_s - waiting.arrived_s
            if calibration.overdue(promise.bucket, promise.raw, miss, waited_s):
                waiting.taught.add(miss)
            else:
                self._look_at(now_s + max(AGAIN_S, waited_s * AGAIN), miss, waiting)

    def _look_at(self, due_s: float, miss: Miss, waiting: WatchedWait) -> None:
        heappush(self._due, (due_s, next(self._serials), miss, waiting))
