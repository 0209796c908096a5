"""How late the event loop woke its timers in the last seconds, for status pages."""

from __future__ import annotations

from collections import deque

KEPT = 500
"""Samples: at 50 a second the last ten seconds."""


class RecentLag:
    """Use from one event loop."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=KEPT)

    def note(self, lag_s: float) -> None:
        self._samples.append(lag_s)

    @property
    def most_s(self) -> float:
        return max(self._samples, default=0.0)
