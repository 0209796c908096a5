"""Memory of what was used once, bounded in number and time. Pure: times are of the wall clock, in seconds."""

from __future__ import annotations

from collections import OrderedDict

from engine.vllm_plugin.signature import SKEW_S

MAX_REMEMBERED = 100_000


class SeenOnce:
    """Says whether a signed text comes for the first time.

    A signature is good within `SKEW_S` of its time, so that it need not be remembered for longer. Where more
    are signed in that time than are remembered, the oldest are forgotten and everything that is not younger
    than those is refused: forgetting never makes a signature good twice.
    """

    def __init__(self, *, most: int = MAX_REMEMBERED) -> None:
        self._most = most
        self._seen: OrderedDict[str, float] = OrderedDict()
        """Name -> when it was signed, in order of arrival."""
        self._floor_s = float("-inf")

    def is_first(self, name: str, issued_at_s: float, now_s: float) -> bool:
        """Notes `name`, which was signed at `issued_at_s`; False: it was used before, or may have been."""
        if issued_at_s <= self._floor_s or name in self._seen:
            return False
        self._seen[name] = issued_at_s
        # By arrival, so that one from a fast clock may stand before older ones: those are kept for longer.
        while self._seen and next(iter(self._seen.values())) < now_s - SKEW_S:
            self._seen.popitem(last=False)
        while len(self._seen) > self._most:
            _, oldest_s = self._seen.popitem(last=False)
            self._floor_s = max(self._floor_s, oldest_s)
        return True

    def __len__(self) -> int:
        return len(self._seen)
