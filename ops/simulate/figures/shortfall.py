"""Differences between simulated and measured times, learned from traffic that was really served.

A simulated replica takes steps and nothing else; a real request also waits for messages and a busy
interpreter. Real less simulated time (to the first token, and from there to the last) is measured where
traffic was recorded *and* simulated under the policy that served it, and drawn at random for requests of
another simulation with similar simulated times (bootstrapping of residuals, Efron 1979).
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from operator import attrgetter
from typing import NamedTuple

from ops.simulate.records import Records

NEIGHBOURS = 50
"""By the time to the first token: enough to have slow ones, few enough to be alike."""
ALIKE = 12
"""Of those, by the time of decoding; one of them is drawn."""


class Residual(NamedTuple):
    """One request that was compared, in seconds; below 0: faster than simulated."""

    simulated_ttft_s: float
    simulated_decode_s: float
    ttft_s: float
    """First token, real less simulated."""
    decode_s: float


_TTFT = attrgetter("simulated_ttft_s")


def residuals_of(real: Records, simulated: Records) -> dict[int, Residual]:
    """By row, of the same requests in order, served and simulated to their ends. Raises ValueError."""
    if len(real) != len(simulated):
        raise ValueError(f"{len(real)} requests were served and {len(simulated)} simulated")
    residuals: dict[int, Residual] = {}
    for row in simulated.done():
        if real.last_s[row] >= 0:
            ttft_s, decode_s = simulated.ttft_s(row), simulated.last_s[row] - simulated.first_s[row]
            real_decode_s = real.last_s[row] - real.first_s[row]
            residuals[row] = Residual(ttft_s, decode_s, real.ttft_s(row) - ttft_s, real_decode_s - decode_s)
    return residuals


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Of each request that was compared. Raises ValueError for none."""

    residuals: tuple[Residual, ...]

    def __post_init__(self) -> None:
        if not self.residuals:
            raise ValueError("no request was both served and simulated to its end")
        # Equal ones in random order: their values must not decide which of them are drawn.
        shuffled = random.Random("equal").sample(self.residuals, len(self.residuals))
        object.__setattr__(self, "residuals", tuple(sorted(shuffled, key=_TTFT)))

    @staticmethod
    def of(real: Records, simulated: Records) -> Shortfall:
        """The same requests in the same order. Raises ValueError."""
        return Shortfall(tuple(residuals_of(real, simulated).values()))

    def add_to(self, records: Records, seed: str, rows: Iterable[int] | None = None) -> None:
        """Adds to the times of answers in place; no token comes before its request or out of order."""
        rng = random.Random(f"shortfall {seed}")
        for row in records.done() if rows is None else rows:
            decode_s = records.last_s[row] - records.first_s[row]
            drawn = self._drawn(records.ttft_s(row), decode_s, rng)
            records.first_s[row] = max(records.arrival_s[row], records.first_s[row] + drawn.ttft_s)
            records.last_s[row] = records.first_s[row] + max(0.0, decode_s + drawn.decode_s)

    def _drawn(self, ttft_s: float, decode_s: float, rng: random.Random) -> Residual:
        ordered = self.residuals
        width = min(NEIGHBOURS, len(ordered))
        first, end = (look(ordered, ttft_s, key=_TTFT) for look in (bisect_left, bisect_right))
        if end - first > width:
            lowest = first + rng.randrange(end - first - width)
            near: Sequence[Residual] = ordered[lowest : lowest + width]
        else:
            around = ordered[max(0, end - width) : first + width]
            near = nsmallest(width, around, lambda one: abs(one.simulated_ttft_s - ttft_s))
        alike = nsmallest(ALIKE, near, lambda one: (abs(one.simulated_decode_s - decode_s), rng.random()))
        return alike[rng.randrange(len(alike))]
