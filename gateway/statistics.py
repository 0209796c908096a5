"""Of how many was something true of late?"""

from __future__ import annotations

MEMORY = 0.02
"""Weight of the newest case."""


class RecentShare:
    """A share that forgets: the last hundred cases or so."""

    def __init__(self) -> None:
        self.value: float | None = None
        """Between 0 and 1; None: nothing has been noted."""

    def note(self, share: float) -> None:
        """One more case, of which so much was true."""
        self.value = share if self.value is None else self.value + MEMORY * (share - self.value)


# Which of the requests that end are learned from, where they are very many?
#
# To think about an answer takes longer than to count it, and some dozen a second say as much as a thousand.

LEARNED_PER_S = 50.0
"""What is typical of a stream of answers is known from so many of them."""
GAP_MEMORY = 0.02
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
        self._gap_s += GAP_MEMORY * (max(0.0, now_s - self._last_s) - self._gap_s)
        self._last_s = now_s
        self._due += min(1.0, self._gap_s * self._per_s)
        if self._due < 1.0:
            return False
        self._due -= 1.0
        return True
