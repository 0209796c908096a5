"""KV memory left for the next batch, and how it changes.

Paused sequences hold part of the pool. That part, the KV pressure, is one of a few levels. A level lasts
`pressure_hold_s` on average (exponentially distributed) whatever the batches do, and is followed by a
neighbour, either side alike. A batch takes what fits into the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from math import ceil, exp, sqrt

import msgspec

from engine.scheduling.batch_or_wait.batch_model import BatchModel

MOST_PRESSURES = 6
LEAST_HOLD_S = 0.1
MIXED_CHANGES = 500.0
"""After this number of changes on average the starting level no longer matters."""


class KvMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: int = 0
    """0: memory never limits a batch, and there is one pressure only."""
    pressures: tuple[float, ...] = (0.0, 0.5, 0.75)
    """Distinguished parts of the pool that others may hold; rising."""
    pressure_hold_s: float = 30.0

    def __post_init__(self) -> None:
        """Raises ValueError, naming the field, its limits and the way out."""
        if self.tokens < 0:
            raise ValueError(
                f"pool tokens {self.tokens} must not be negative; 0: memory never limits a batch"
            )
        if not 1 <= len(self.pressures) <= MOST_PRESSURES:
            raise ValueError(f"{len(self.pressures)} KV pressures: there must be 1 to {MOST_PRESSURES}")
        if not all(0 <= pressure < 1 for pressure in self.pressures):
            raise ValueError(f"KV pressures {self.pressures} are parts of the pool: 0 <= pressure < 1")
        if any(low >= high for low, high in pairwise(self.pressures)):
            raise ValueError(f"KV pressures {self.pressures} must rise")
        if not LEAST_HOLD_S <= self.pressure_hold_s < float("inf"):
            raise ValueError(
                f"pressure_hold_s {self.pressure_hold_s} must be at least {LEAST_HOLD_S:g} seconds"
            )

    @property
    def levels(self) -> int:
        """Pressures that make a difference."""
        return len(self.pressures) if self.tokens else 1

    @property
    def changes_per_s(self) -> float:
        return 1 / self.pressure_hold_s if self.levels > 1 else 0.0

    def level(self, pressure: float) -> int:
        """The level nearest to the part of the pool that is held."""
        borders = [(low + high) / 2 for low, high in pairwise(self.pressures[: self.levels])]
        return bisect_left(borders, pressure)

    def fits(self, model: BatchModel, count: int, longs: int, level: int, *, short_first: bool) -> int:
        """How many of the first of `count` requests, `longs` of them long, fit at this level; at least 1."""
        if self.tokens == 0:
            return count
        free = self.tokens * (1 - self.pressures[level])
        short_tokens, long_tokens = model.short.total_tokens, model.long.total_tokens
        shorts = count - longs
        if not short_first:
            return max(1, min(count, int(free * count / (shorts * short_tokens + longs * long_tokens))))
        if free < shorts * short_tokens:
            return max(1, int(free / short_tokens))
        return max(1, min(count, shorts + int((free - shorts * short_tokens) / long_tokens)))

    def next_levels(self, level: int) -> list[float]:
        """Where the pressure goes when it changes: probability by level."""
        sides = [side for side in (level - 1, level + 1) if 0 <= side < self.levels]
        return [1 / len(sides) if other in sides else 0.0 for other in range(self.levels)]

    def odds(self, level: int, after_s: float) -> list[float]:
        """Probability of each level `after_s` seconds after this one, by uniformisation."""
        now = [float(other == level) for other in range(self.levels)]
        if self.levels == 1:
            return now
        changes = min(after_s * self.changes_per_s, MIXED_CHANGES)
        chain = [self.next_levels(origin) for origin in range(self.levels)]
        odds = [0.0] * self.levels
        weight = exp(-changes)
        for change in range(ceil(changes + 8 * sqrt(changes) + 8)):
            odds = [sum_ + weight * part for sum_, part in zip(odds, now, strict=True)]
            now = [
                sum(now[origin] * chain[origin][goal] for origin in range(self.levels))
                for goal in range(self.levels)
            ]
            weight *= changes / (change + 1)
        total = sum(odds)
        return [part / total for part in odds]
