"""Memory of what was used once, bounded in number and time. Pure: times are of the wall clock, in seconds."""

from __future__ import annotations

import heapq

from engine.vllm_plugin.signature import SKEW_S

MAX_REMEMBERED = 100_000


class SeenOnce:
    """Says whether a signed text comes for the first time.

    A signature is good within `SKEW_S` of its time, so that it need not be remembered for longer. Where more
    are signed in that time than are remembered, those that were signed first are forgotten. What is not
    younger than anything forgotten is refused: forgetting never makes a signature good twice, also where the
    clock was set forward and back.
    """

    def __init__(self, *, most: int = MAX_REMEMBERED) -> None:
        self._most = most
        self._seen: set[str] = set()
        self._by_time: list[tuple[float, str]] = []
        """A heap of the same: when each was signed, and its name."""
        self._floor_s = float("-inf")

    def is_first(self, name: str, issued_at_s: float, now_s: float) -> bool:
        """Notes `name`, which was signed at `issued_at_s`; False: it was used before, or may have been."""
        if issued_at_s <= self._floor_s or name in self._seen:
            return False
        self._seen.add(name)
        heapq.heappush(self._by_time, (issued_at_s, name))
        while self._by_time and (self._by_time[0][0] < now_s - SKEW_S or len(self._seen) > self._most):
            self._floor_s, oldest = heapq.heappop(self._by_time)
            self._seen.remove(oldest)
        return True

    def __len__(self) -> int:
        return len(self._seen)
