"""Recent arrival rate, requests per second."""

from __future__ import annotations

MEMORY_ARRIVALS = 32
"""Arrivals over which the rate is averaged, about."""
SHORTEST_GAP_S = 1e-9


class ArrivalRate:
    """Told of every arrival; the mean gap decays exponentially, and is the plain mean at first."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._gap_s = 0.0
        self._gaps = 0

    def note(self, now_s: float) -> None:
        """A request arrived. Clocks that go back do no harm."""
        if self._last_s is not None:
            gap_s = max(0.0, now_s - self._last_s)
            self._gaps += 1
            self._gap_s += max(1 / MEMORY_ARRIVALS, 1 / self._gaps) * (gap_s - self._gap_s)
        self._last_s = now_s

    @property
    def per_s(self) -> float:
        """Arrivals a second; 0 before there are two."""
        return 1 / max(self._gap_s, SHORTEST_GAP_S) if self._gaps else 0.0
