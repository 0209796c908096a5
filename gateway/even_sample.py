"""Which of the requests that end are learned from, where they are very many?

To think about an answer takes longer than to count it, and some dozen a second say as much as a thousand.
"""

from __future__ import annotations

LEARNED_PER_S = 50.0
"""What is typical of a stream of answers is known from so many of them."""
MEMORY = 0.02
"""Weight of the latest gap between two of them in what is usual."""
FIRST_GAP_S = 1.0


class EvenSample:
    """All where few come, `per_s` a second of many, evenly chosen. The first few hundred of a rush are all
    taken, until it is known to be one. Times are passed in."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._gap_s = FIRST_GAP_S
        self._last_s = 0.0
        self._due = 0.0

    def takes(self, now_s: float) -> bool:
        """Whether the one that comes now is among them."""
        self._gap_s += MEMORY * (max(0.0, now_s - self._last_s) - self._gap_s)
        self._last_s = now_s
        self._due += min(1.0, self._gap_s * self._per_s)
        if self._due < 1.0:
            return False
        self._due -= 1.0
        return True
