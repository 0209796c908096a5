"""What does a simulation fall short of, by the word of traffic that was really served?

A simulated replica takes steps and nothing else. A real request also waits for messages between gateway and
engine, for an interpreter that is busy, for a step that took longer than its like. What that comes to is
measured where traffic was recorded *and* simulated under the policy that served it: request by request, real
less simulated. Drawn at random for the requests of another simulation (bootstrapping of residuals, Efron
1979), it puts their times right as far as it depends neither on the policy nor on the load.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ops.simulate.records import Records


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Of each request that was compared: seconds that its first and its last token came later than
    simulated; below 0, earlier. Raises ValueError for none."""

    seconds: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ValueError("no request was both served and simulated to its end")

    @staticmethod
    def of(real: Records, simulated: Records) -> Shortfall:
        """The same requests in the same order. Raises ValueError."""
        if len(real) != len(simulated):
            raise ValueError(f"{len(real)} requests were served and {len(simulated)} simulated")
        both = (row for row in simulated.done() if real.last_s[row] >= 0)
        return Shortfall(
            tuple(
                (real.ttft_s(row) - simulated.ttft_s(row), real.e2e_s(row) - simulated.e2e_s(row))
                for row in both
            )
        )

    def add_to(self, records: Records, seed: str) -> None:
        """Puts every answer's times right, in place; no token comes before its request or out of order."""
        rng = random.Random(f"shortfall {seed}")
        for row in records.done():
            first_s, last_s = rng.choice(self.seconds)
            records.first_s[row] = max(records.arrival_s[row], records.first_s[row] + first_s)
            records.last_s[row] = max(records.first_s[row], records.last_s[row] + last_s)
