"""Circuit breaker of one server, decided by the gateway's own requests. Pure.

Closed (everything passes), open (nothing passes), half open after a pause (the gateway asks for one token). A
failed request is only a suspicion, as its tenant may have caused it: the gateway then asks for one token, at
most every `ask_every_s`, and opens the breaker if that fails; each further failure doubles the pause.
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
    """What `ask_in_s` calls for begins with `asking` and ends with `answered`."""

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
        return self._open_until_s is None

    def state(self, now_s: float) -> BreakerState:
        if self._open_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._open_until_s else BreakerState.HALF_OPEN

    def retry_in_s(self, now_s: float) -> float:
        """Seconds until the server is asked again; 0: immediately."""
        return max(0.0, self._open_until_s - now_s) if self._open_until_s is not None else 0.0

    def suspect(self) -> None:
        self._is_suspected = True

    def ask_in_s(self, now_s: float) -> float | None:
        """Seconds until the server should be asked for one token; None: no reason, or being asked."""
        if self._is_asked or (self.is_closed and not self._is_suspected):
            return None
        return max(self.retry_in_s(now_s), self._asked_s + self._rule.ask_every_s - now_s, 0.0)

    def asking(self, now_s: float) -> None:
        """The server is asked. Failures from now on are a new suspicion."""
        self._is_asked, self._is_suspected, self._asked_s = True, False, now_s

    def answered(self, is_well: bool, now_s: float) -> None:
        self._is_asked = False
        if is_well:
            self._open_until_s, self._openings = None, 0
            return
        rule = self._rule
        self._open_until_s = now_s + min(
            rule.longest_open_s, rule.first_open_s * 2.0 ** min(self._openings, 30)
        )
        self._openings += 1
