"""A queue before a server that runs batches to completion, under a fixed size and window.

Plain arithmetic on arrival times, which tests compare with an engine (`batch_replica`).
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from engine.scheduling.batch_or_wait.batch_model import BatchModel
from engine.scheduling.batch_or_wait.objective import Objective

WARM_UP = 200
"""Requests at the start that are not measured."""
_NEVER = float("inf")


@dataclass(frozen=True)
class Arrivals:
    """A stream of short and long requests."""

    times_s: list[float]
    longs: list[bool]

    @cached_property
    def longs_before(self) -> list[int]:
        """Long ones among the first 0, 1, 2, ... requests."""
        return [0, *accumulate(int(long) for long in self.longs)]

    @cached_property
    def by_kind(self) -> list[list[float]]:
        """Times of the short ones, and of the long ones."""
        pairs = list(zip(self.times_s, self.longs, strict=True))
        return [[time_s for time_s, long in pairs if long is kind] for kind in (False, True)]

    @cached_property
    def sums_by_kind(self) -> list[list[float]]:
        """Sums of the first 0, 1, 2, ... of these times."""
        return [[0.0, *accumulate(times_s)] for times_s in self.by_kind]

    @staticmethod
    def poisson(rate_per_s: float, long_share: float, count: int, seed: int) -> Arrivals:
        """At one rate."""
        rng = random.Random(seed)
        times_s = list(accumulate(rng.expovariate(rate_per_s) for _ in range(count)))
        return Arrivals(times_s, [rng.random() < long_share for _ in times_s])


@dataclass(frozen=True, slots=True)
class StreamOutcome:
    """Result of a policy on a stream."""

    mean_latency_s: float
    mean_watts: float
    late_share: float
    mean_batch: float

    def cost(self, objective: Objective) -> float:
        """In the objective's unit."""
        return (
            objective.alpha * self.mean_latency_s
            + objective.beta * self.mean_watts
            + objective.gamma * self.late_share
        )


class Queue:
    """The queue before the server: short and long requests, each in order of arrival."""

    def __init__(self, model: BatchModel, arrivals: Arrivals, slo_s: float) -> None:
        self._model, self._slo_s = model, slo_s
        self.times_s = arrivals.times_s
        self._longs_before = arrivals.longs_before
        self._of_kind, self._sums = arrivals.by_kind, arrivals.sums_by_kind
        self._served = [0, 0]
        self._arrived = 0
        self._latency_s = self._joules = 0.0
        self._late = self._requests = self._batches = 0
        self._began_s = self._ended_s = 0.0

    @property
    def served(self) -> int:
        """Requests run so far."""
        return self._served[0] + self._served[1]

    @property
    def first_s(self) -> float:
        """When the first of those not yet run arrives or arrived."""
        shorts, longs = self._of_kind
        short, long = self._served
        return min(
            shorts[short] if short < len(shorts) else _NEVER, longs[long] if long < len(longs) else _NEVER
        )

    def see(self, now_s: float) -> tuple[int, int]:
        """Short and long ones that wait at `now_s`."""
        self._arrived = arrived = bisect_right(self.times_s, now_s, self._arrived)
        longs = self._longs_before[arrived]
        return arrived - longs - self._served[0], longs - self._served[1]

    @property
    def next_s(self) -> float:
        """When the next one arrives, of those not yet seen."""
        return self.times_s[self._arrived] if self._arrived < len(self.times_s) else _NEVER

    def first_of_line(self, size: int, waiting: tuple[int, int], *, short_first: bool) -> tuple[int, int]:
        """Short and long ones among the first `size` of those that wait."""
        batch = min(size, sum(waiting))
        if short_first:
            shorts = min(waiting[0], batch)
            return shorts, batch - shorts
        longs = self._longs_before[self.served + batch] - self._served[1]
        return batch - longs, longs

    def run(self, batch: tuple[int, int], start_s: float) -> float:
        """Runs that many short and long ones; returns when the batch ends."""
        end_s = start_s + self._model.service_s(*batch)
        measured = self.served >= WARM_UP
        if measured and self._requests == 0:
            self._began_s = self._ended_s
        for kind, count in enumerate(batch):
            first = self._served[kind]
            last = self._served[kind] = first + count
            if measured and count:
                self._latency_s += end_s * count - (self._sums[kind][last] - self._sums[kind][first])
                # Started exactly at the target is in time; rounding must not decide.
                due_s = start_s - self._slo_s - 1e-9
                self._late += bisect_left(self._of_kind[kind], due_s, first, last) - first
        if measured:
            self._requests += sum(batch)
            self._batches += 1
            self._joules += self._model.energy_j(*batch)
        self._ended_s = end_s
        return end_s

    def outcome(self) -> StreamOutcome:
        """Means over the measured requests."""
        return StreamOutcome(
            self._latency_s / self._requests,
            self._joules / (self._ended_s - self._began_s),
            self._late / self._requests,
            self._requests / self._batches,
        )


@dataclass(frozen=True, slots=True)
class Fixed:
    """A batch of up to `size` runs when `size` requests wait or the first has waited `window_s`."""

    size: int
    window_s: float
    short_first: bool
    """The line is in order of length, or of arrival."""


def by_fixed(model: BatchModel, arrivals: Arrivals, slo_s: float, policy: Fixed) -> StreamOutcome:
    """The queue under a fixed policy."""
    queue = Queue(model, arrivals, slo_s)
    count, free_s = len(arrivals.times_s), 0.0
    while (served := queue.served) < count:
        full = served + policy.size - 1
        full_s = queue.times_s[full] if full < count else _NEVER
        start_s = max(free_s, min(full_s, queue.first_s + policy.window_s))
        if start_s == _NEVER:
            # No more will come: what is left of an endless window runs with the last arrival.
            start_s = max(free_s, queue.times_s[-1])
        waiting = queue.see(start_s)
        batch = queue.first_of_line(policy.size, waiting, short_first=policy.short_first)
        free_s = queue.run(batch, start_s)
    return queue.outcome()
