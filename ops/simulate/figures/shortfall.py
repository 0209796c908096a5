"""Differences between simulated and measured times, learned from traffic that was really served.

A simulated replica takes steps and nothing else. A real request also waits for messages between gateway and
engine, for an interpreter that is busy, for a step that took longer than its like. What that comes to is
measured where traffic was recorded *and* simulated under the policy that served it: request by request, real
less simulated. It is drawn at random for the requests of another simulation (bootstrapping of residuals,
Efron 1979), among those whose simulated first token came about as late: a request that waits for others
waits for what they fall short of as well. That puts times right as far as it depends neither on the policy
nor on the load.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from ops.simulate.records import Records

NEIGHBOURS = 50
"""Neighbours it is drawn from: enough to have slow ones, few enough to be alike."""


class Residual(NamedTuple):
    """One request that was compared, in seconds; below 0: earlier than simulated."""

    simulated_ttft_s: float
    first_s: float
    """By which its first token came later than simulated."""
    last_s: float
    """By which its last one did."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Of each request that was compared, by simulated time to the first token. Raises ValueError for none."""

    residuals: tuple[Residual, ...]

    def __post_init__(self) -> None:
        if not self.residuals:
            raise ValueError("no request was both served and simulated to its end")
        object.__setattr__(self, "residuals", tuple(sorted(self.residuals)))

    @staticmethod
    def of(real: Records, simulated: Records) -> Shortfall:
        """The same requests in the same order. Raises ValueError."""
        if len(real) != len(simulated):
            raise ValueError(f"{len(real)} requests were served and {len(simulated)} simulated")
        both = (row for row in simulated.done() if real.last_s[row] >= 0)
        return Shortfall(
            tuple(
                Residual(
                    simulated.ttft_s(row),
                    real.ttft_s(row) - simulated.ttft_s(row),
                    real.e2e_s(row) - simulated.e2e_s(row),
                )
                for row in both
            )
        )

    def add_to(self, records: Records, seed: str) -> None:
        """Puts every answer's times right, in place; no token comes before its request or out of order."""
        rng = random.Random(f"shortfall {seed}")
        width = min(NEIGHBOURS, len(self.residuals))
        for row in records.done():
            nearest = bisect_left(self.residuals, (records.ttft_s(row),))
            lowest = min(max(0, nearest - width // 2), len(self.residuals) - width)
            drawn = self.residuals[lowest + rng.randrange(width)]
            records.first_s[row] = max(records.arrival_s[row], records.first_s[row] + drawn.first_s)
            records.last_s[row] = max(records.first_s[row], records.last_s[row] + drawn.last_s)
