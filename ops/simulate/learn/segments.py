"""Cuts a trace into stretches of time: every other one to learn from, the others to judge by. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ops.simulate.traffic.requests import SimulatedRequest

MOST_STRETCHES = 24
"""Of a trace of up to a day; a longer one has as many as it has hours."""
LEAST_STRETCHES = 4
SHORTEST_S, USUAL_S, LONGEST_S = 60.0, 120.0, 3600.0
LEAST_REQUESTS = 400
MOST_REQUESTS = 1_000_000
JITTER_S = 1.0
"""Seeds move arrivals by at most this, either way."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Requests of one piece of a stretch, from its beginning; implements `Source`."""

    number: int
    name: str
    requests: tuple[SimulatedRequest, ...]
    has_prefixes: bool = False

    def __iter__(self) -> Iterator[SimulatedRequest]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    def jittered(self, seed: int) -> Piece:
        rng = random.Random(f"piece {self.number} seed {seed}")
        moved = [
            replace(request, arrival_s=max(0.0, request.arrival_s + rng.uniform(-JITTER_S, JITTER_S)))
            for request in self.requests
        ]
        return replace(self, requests=tuple(sorted(moved, key=lambda request: request.arrival_s)))


@dataclass(frozen=True, slots=True)
class Split:
    learnt_from: tuple[Piece, ...]
    held_out: tuple[Piece, ...]
    stretch_s: float
    piece_s: float


def split(name: str, requests: Sequence[SimulatedRequest], *, has_prefixes: bool = False) -> Split:
    """Raises `ValueError` for a trace too short to hold anything out, or of more than `MOST_REQUESTS`."""
    if len(requests) > MOST_REQUESTS:
        raise ValueError(
            f"{name}: more than {MOST_REQUESTS:,} requests; take fewer days (--days), or cut the trace"
        )
    span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    if span_s < LEAST_STRETCHES * SHORTEST_S or len(requests) < LEAST_REQUESTS:
        raise ValueError(
            f"{name}: {len(requests):,} requests over {span_s:,.0f} s are too few to hold any out: at least"
            f" {LEAST_REQUESTS:,} requests over {LEAST_STRETCHES * SHORTEST_S:g} s are needed; take a longer"
            " trace, or more days (--days)"
        )
    stretch_s = stretch_s_of(span_s)
    pieces_a_stretch = max(1, round(stretch_s / USUAL_S))
    piece_s = stretch_s / pieces_a_stretch
    first_s = requests[0].arrival_s
    # Less than half a piece, left over at the end, belongs to the one before it.
    last = max(1, int(span_s / piece_s + 0.5)) - 1
    parts: dict[int, list[SimulatedRequest]] = {}
    for request in requests:
        number = min(last, int((request.arrival_s - first_s) / piece_s))
        begins_s = first_s + number * piece_s
        parts.setdefault(number, []).append(replace(request, arrival_s=request.arrival_s - begins_s))
    halves: tuple[list[Piece], list[Piece]] = [], []
    stretches = sorted({number // pieces_a_stretch for number in parts})
    for number, part in sorted(parts.items()):
        half = stretches.index(number // pieces_a_stretch) % 2
        halves[half].append(Piece(number, f"{name} from {number * piece_s:g} s", tuple(part), has_prefixes))
    if len(stretches) < LEAST_STRETCHES:
        raise ValueError(
            f"{name}: requests came in {len(stretches)} of its stretches of {stretch_s:g} s, and"
            f" {LEAST_STRETCHES} are needed; take a longer trace, or more days (--days)"
        )
    return Split(tuple(halves[0]), tuple(halves[1]), stretch_s, piece_s)


def stretch_s_of(span_s: float) -> float:
    wanted = min(LONGEST_S, max(USUAL_S, span_s / MOST_STRETCHES))
    return max(SHORTEST_S, min(wanted, span_s / LEAST_STRETCHES))


def some_of(pieces: Sequence[Piece], most_requests: int) -> tuple[Piece, ...]:
    """Evenly spaced ones with at most so many requests in all, the first one whatever it has."""
    for count in range(len(pieces), 0, -1):
        chosen = [pieces[number * len(pieces) // count] for number in range(count)]
        if count == 1 or sum(map(len, chosen)) <= most_requests:
            return tuple(chosen)
    return ()
