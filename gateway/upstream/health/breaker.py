"""Circuit breaker of one server, decided by the gateway's own requests.

Closed (everything passes), open (nothing passes), half open after a pause (still nothing passes, and the
gateway asks the server for one token). A request that fails is only a suspicion: its tenant may have caused
it. The gateway then asks for one token, at most one request at a time and one a `ask_every_s`, and only where
that fails the breaker opens; each further failure doubles the pause. Pure: time is passed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """Clients' requests pass only while it is closed."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerRule:
    """How often a server is asked, and how long it is left alone."""

    ask_every_s: float = 1.0
    first_open_s: float = 2.0
    longest_open_s: float = 60.0


class Breaker:
    """The breaker of one server. What `ask_in_s` calls for begins with `asking` and ends with `answered`."""

    def __init__(self, rule: BreakerRule | None = None) -> None:
        self._rule = rule or BreakerRule()
        self._open_until_s: float | None = None
        self._openings = 0
        """In a row."""
        self._is_suspected = False
        self._is_asked = False
        self._asked_s = -math.inf

    @property
    def is_closed(self) -> bool:
        """Clients' requests pass, whatever the time."""
        return self._open_until_s is None

    def state(self, now_s: float) -> BreakerState:
        """The state at `now_s`."""
        if self._open_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._open_until_s else BreakerState.HALF_OPEN

    def retry_in_s(self, now_s: float) -> float:
        """Seconds until the server is asked whether it serves again; 0 where nothing keeps it from that."""
        return max(0.0, self._open_until_s - now_s) if self._open_until_s is not None else 0.0

    def suspect(self) -> None:
        """A request failed there."""
        self._is_suspected = True

    def ask_in_s(self, now_s: float) -> float | None:
        """Seconds until the server should be asked for one token; None: there is no reason to, or it is being
        asked."""
        if self._is_asked or (self.is_closed and not self._is_suspected):
            return None
        return max(self.retry_in_s(now_s), self._asked_s + self._rule.ask_every_s - now_s, 0.0)

    def asking(self, now_s: float) -> None:
        """The server is asked. What fails from now on is a suspicion of its own."""
        self._is_asked, self._is_suspected, self._asked_s = True, False, now_s

    def answered(self, is_well: bool, now_s: float) -> None:
        """The server gave its token, or did not."""
        self._is_asked = False
        if is_well:
            self._open_until_s, self._openings = None, 0
            return
        rule = self._rule
        self._open_until_s = now_s + min(
            rule.longest_open_s, rule.first_open_s * 2.0 ** min(self._openings, 30)
        )
        self._openings += 1
