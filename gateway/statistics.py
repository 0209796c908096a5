"""Exponentially weighted shares, and even sampling of a stream of events."""

from __future__ import annotations

from math import exp

MEMORY = 0.02
"""Weight of the newest case."""


class RecentShare:
    """A share over about the last hundred cases."""

    def __init__(self) -> None:
        self.value: float | None = None
        """0 to 1; None: nothing noted."""

    def note(self, share: float) -> None:
        self.value = share if self.value is None else self.value + MEMORY * (share - self.value)


DOUBT = 0.5


class FadingShare:
    """A share of the cases of about the last `memory_s`, with `DOUBT` that never happened: it fades to 0."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._at_s = 0.0
        self._share = 0.0
        self._count = 0.0

    def note(self, share: float, now_s: float) -> None:
        self._fade(now_s)
        self._share += share
        self._count += 1.0

    def at(self, now_s: float) -> float:
        """0 to 1."""
        self._fade(now_s)
        return self._share / (DOUBT + self._count)

    def _fade(self, now_s: float) -> None:
        left = exp(min(0.0, self._at_s - now_s) / self._memory_s)
        self._at_s = max(self._at_s, now_s)
        self._share *= left
        self._count *= left


# Learning from an answer costs more than counting it, and a few dozen a second suffice.

LEARNED_PER_S = 50.0
"""Events after which the typical gap is known."""
GAP_MEMORY = 0.02
"""Weight of the latest gap in the typical one."""
FIRST_GAP_S = 1.0


class EvenSample:
    """Selects all events of a slow stream or a burst's start, and evenly `per_s` a second of others."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._gap_s = FIRST_GAP_S
        self._last_s = 0.0
        self._due = 0.0

    def takes(self, now_s: float) -> bool:
        self._gap_s += GAP_MEMORY * (max(0.0, now_s - self._last_s) - self._gap_s)
        self._last_s = now_s
        self._due += min(1.0, self._gap_s * self._per_s)
        if self._due < 1.0:
            return False
        self._due -= 1.0
        return True
