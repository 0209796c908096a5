"""Objective: alpha x mean latency [s] + beta x mean power [W] + gamma x share that started late."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Objective:
    """What a second, a watt and a late start are worth, in any one unit."""

    alpha: float = 1.0
    """Of a second of mean latency, from arrival to the end of its batch."""
    beta: float = 0.01
    """Of a watt of mean power."""
    gamma: float = 1.0
    """Of all requests starting later than `slo_s` after their arrival."""
    slo_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} {getattr(self, name)} must be a number, not negative")
        if self.alpha == 0 and self.gamma == 0:
            raise ValueError("alpha or gamma must be positive: else never running anything would be best")
        if not 0 < self.slo_s < float("inf"):
            raise ValueError(f"slo_s {self.slo_s} must be positive")


def late_starts(count: int, batch: int, oldest_wait_s: float, slo_s: float) -> float:
    """How many of the first `batch` of `count` requests have waited longer than `slo_s`, spread evenly."""
    if oldest_wait_s <= slo_s:
        return 0.0
    return min(float(batch), 1 + (count - 1) * (oldest_wait_s - slo_s) / oldest_wait_s)
