"""Cuts a trace into stretches of time: every other one to learn from, the others held out to judge by.

A stretch is an hour where the trace has many, and shorter where it has not. Each is simulated by itself, from
an empty pool. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ops.simulate.traffic.requests import SimulatedRequest

MOST_STRETCHES = 24
"""Of a trace of up to a day; of a longer one as many as it has hours."""
LEAST_STRETCHES = 4
"""Two to learn from, two held out."""
SHORTEST_S, USUAL_S, LONGEST_S = 60.0, 120.0, 3600.0
LEAST_REQUESTS = 400
"""Of the whole trace."""
JITTER_S = 1.0
"""What seeds move arrivals by, at most, either way."""


class TraceTooShort(ValueError):
    """Nothing of it can be held out; the message says how much is needed."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Requests of one stretch of time, from its beginning; implements `Source`."""

    number: int
    name: str
    requests: tuple[SimulatedRequest, ...]
    has_prefixes: bool = False

    def __iter__(self) -> Iterator[SimulatedRequest]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    def jittered(self, seed: int) -> Stretch:
        """The same requests, each up to `JITTER_S` earlier or later: drawn anew with each seed."""
        rng = random.Random(f"stretch {self.number} seed {seed}")
        moved = [
            replace(request, arrival_s=max(0.0, request.arrival_s + rng.uniform(-JITTER_S, JITTER_S)))
            for request in self.requests
        ]
        return replace(self, requests=tuple(sorted(moved, key=lambda request: request.arrival_s)))


@dataclass(frozen=True, slots=True)
class Split:
    """A trace in two halves that have no request in common."""

    learnt_from: tuple[Stretch, ...]
    held_out: tuple[Stretch, ...]
    seconds: float
    """Of one stretch."""


def split(name: str, requests: Sequence[SimulatedRequest], *, has_prefixes: bool = False) -> Split:
    """Every other stretch is held out. Raises `TraceTooShort`."""
    span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    if span_s < LEAST_STRETCHES * SHORTEST_S or len(requests) < LEAST_REQUESTS:
        raise TraceTooShort(
            f"{name}: {len(requests):,} requests over {span_s:,.0f} s are too few to hold any out: at least"
            f" {LEAST_REQUESTS:,} requests over {LEAST_STRETCHES * SHORTEST_S:g} s are needed; take a longer"
            " trace, or more days (--days)"
        )
    seconds = stretch_s(span_s)
    first_s = requests[0].arrival_s
    parts: dict[int, list[SimulatedRequest]] = {}
    last = int(span_s // seconds) - (span_s % seconds < seconds / 2)
    for request in requests:
        number = min(last, int((request.arrival_s - first_s) // seconds))
        begins_s = first_s + number * seconds
        parts.setdefault(number, []).append(replace(request, arrival_s=request.arrival_s - begins_s))
    stretches = [
        Stretch(number, f"{name}, from {number * seconds:g} s", tuple(part), has_prefixes)
        for number, part in sorted(parts.items())
    ]
    found = Split(tuple(stretches[::2]), tuple(stretches[1::2]), seconds)
    if len(stretches) < LEAST_STRETCHES:
        raise TraceTooShort(
            f"{name}: requests came in {len(stretches)} of its stretches of {seconds:g} s, and"
            f" {LEAST_STRETCHES} are needed; take a longer trace, or more days (--days)"
        )
    return found


def stretch_s(span_s: float) -> float:
    """The length of one stretch."""
    wanted = min(LONGEST_S, max(USUAL_S, span_s / MOST_STRETCHES))
    return max(SHORTEST_S, min(wanted, span_s / LEAST_STRETCHES))


def some_of(stretches: Sequence[Stretch], most_requests: int) -> tuple[Stretch, ...]:
    """Evenly spaced ones with at most so many requests in all, the first one whatever it has."""
    for count in range(len(stretches), 0, -1):
        chosen = [stretches[number * len(stretches) // count] for number in range(count)]
        if count == 1 or sum(map(len, chosen)) <= most_requests:
            return tuple(chosen)
    return ()
