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
