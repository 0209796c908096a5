"""Circuit breaker of one server.

Closed (everything passes), open after a number of failures in a row (nothing passes), half open after a pause
(a few calls pass: the first success closes it, the first failure opens it for twice as long). Pure: time is
passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """What the breaker lets pass."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerRule:
    """The number of failures in a row that opens it, and for how long."""

    failures: int = 5
    first_open_s: float = 2.0
    longest_open_s: float = 60.0
    trials: int = 3
    """Calls that may be under way while it is half open."""


class Breaker:
    """The breaker of one server. Every call that was begun ends in `succeeded`, `failed` or `abandoned`,
    once."""

    def __init__(self, rule: BreakerRule | None = None) -> None:
        self._rule = rule or BreakerRule()
        self._failures = 0
        self._openings = 0
        """Failures in a row."""
        self._open_until_s: float | None = None
        self._trials = 0
        self._epoch = 0
        """Calls begun before the last change of state do not count."""

    @property
    def is_closed(self) -> bool:
        """Closed: the usual state, whatever the time."""
        return self._open_until_s is None

    def state(self, now_s: float) -> BreakerState:
        """The state at `now_s`."""
        if self._open_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._open_until_s else BreakerState.HALF_OPEN

    def allows(self, now_s: float) -> bool:
        """Whether a call may begin."""
        if self.is_closed:
            return True
        return self.state(now_s) is BreakerState.HALF_OPEN and self._trials < self._rule.trials

    def retry_in_s(self, now_s: float) -> float:
        """Seconds until a call may begin; 0 where it may now."""
        return max(0.0, self._open_until_s - now_s) if self._open_until_s is not None else 0.0

    def begin(self, now_s: float) -> int:
        """A call begins; returns the epoch for its end."""
        if self.state(now_s) is BreakerState.HALF_OPEN:
            self._trials += 1
        return self._epoch

    def succeeded(self, epoch: int) -> int:
        """The server answered properly, however late. Returns the epoch for a later failure of the same call,
        in mid-answer."""
        if epoch == self._epoch:
            self._failures = self._openings = 0
            if self._open_until_s is not None:
                self._change(None)
        return self._epoch

    def failed(self, epoch: int, now_s: float) -> None:
        """The server did not answer, or not properly."""
        if epoch != self._epoch:
            return
        self._failures += 1
        if self._open_until_s is None and self._failures < self._rule.failures:
            return
        pause_s = min(self._rule.longest_open_s, self._rule.first_open_s * 2.0 ** min(self._openings, 30))
        self._openings += 1
        self._change(now_s + pause_s)

    def abandoned(self, epoch: int) -> None:
        """The call ended without a result: its client left."""
        if epoch == self._epoch and self._open_until_s is not None:
            self._trials = max(0, self._trials - 1)

    def _change(self, open_until_s: float | None) -> None:
        self._open_until_s = open_until_s
        self._failures = 0
        self._trials = 0
        self._epoch += 1
