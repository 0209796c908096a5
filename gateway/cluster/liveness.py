"""Is this gateway still known to live, and which others are not any more?

Pure but for the clock that is passed in: `Liveness` judges what the registry said. Whoever was silent for
`stale_s` may be taken for dead, and what it has reserved is then settled by somebody else. So a gateway that
could not say that it lives (it was stopped, or lost the database) starts nothing that waits here any more
(`require`): its waiting requests may have been settled meanwhile. And it takes nobody else for dead before
it has itself been in touch for `stale_s` without a break: after an outage of the database everybody gets
the time to say that he lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tenants.directory.gateways import GatewaySeen
from tenants.errors import DatabaseUnavailable

MARGIN_S = 2.0
"""Between the last moment to start something and the first to be taken for dead: what was sent until then
has arrived."""


class Liveness:
    """What one gateway knows of its own standing. Use from one event loop."""

    def __init__(self, gateway_id: str, stale_s: float, clock: Callable[[], float]) -> None:
        """`stale_s` must be larger than `MARGIN_S`; `clock` goes on while the process stands still."""
        if not stale_s > MARGIN_S:
            raise ValueError(f"gateway_stale_s must be more than {MARGIN_S:g} seconds, not {stale_s:g}")
        self._gateway_id = gateway_id
        self._stale_s = stale_s
        self._clock = clock
        self._beaten_s = float("-inf")
        self._in_touch_since_s = float("inf")

    def beaten(self, asked_s: float, seen: Iterable[GatewaySeen]) -> list[GatewaySeen]:
        """Notes a heartbeat that was sent at `asked_s`, and what the registry said to it; returns the
        gateways that are dead."""
        if asked_s - self._beaten_s > self._stale_s:
            self._in_touch_since_s = asked_s
        self._beaten_s = asked_s
        if asked_s - self._in_touch_since_s < self._stale_s:
            return []
        return [
            each for each in seen if each.silent_s > self._stale_s and each.gateway_id != self._gateway_id
        ]

    def require(self) -> None:
        """Raises `DatabaseUnavailable` when this gateway may have been taken for dead."""
        if self._clock() - self._beaten_s > self._stale_s - MARGIN_S:
            raise DatabaseUnavailable("this gateway was out of touch for too long: what waited here is void")
