"""What the engines really served in the last seconds in which requests waited, for a floor of waits. Pure.

A replay goes by the time of a step, and corrections by what became of earlier requests: neither sees what
holds up the whole machine. The rate does, so no wait is told shorter than it allows."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_S = 10.0
"""Seconds after which one counts half."""
LEAST_S = 3.0
"""Fewer say nothing."""
LONGEST_GAP_S = 10.0
"""A longer time without service is an outage, and no pace."""


@dataclass(slots=True)
class ServiceRate:
    _at_s: float | None = None
    """When service was last seen to go on; None: nothing waited since."""
    _cost: int = 0
    _elapsed_s: float = 0.0
    _served: float = 0.0

    @property
    def cost_per_s(self) -> float | None:
        """Cost tokens a second; None: not known."""
        return self._served / self._elapsed_s if self._elapsed_s >= LEAST_S else None

    def see(self, now_s: float, cost: int, *, waits: bool) -> None:
        """`cost`: all cost tokens served so far; `waits`: requests want more than is served."""
        if not waits or self._at_s is None:
            self._at_s, self._cost = (now_s if waits else None), cost
        elif cost > self._cost:
            elapsed_s = min(now_s - self._at_s, LONGEST_GAP_S)
            keep = 0.5 ** (elapsed_s / MEMORY_S)
            self._elapsed_s = self._elapsed_s * keep + elapsed_s
            self._served = self._served * keep + cost - self._cost
            self._at_s, self._cost = now_s, cost
