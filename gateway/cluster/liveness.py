"""Liveness of this gateway and the others, from the registry's heartbeats. Pure.

A gateway silent for `stale_s` may be taken for dead and its reservations settled by another, so one that
could not write its heartbeat starts no waiting request (`require`). It takes no other for dead before having
been in touch for `stale_s` itself, so that all can write theirs after a database outage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tenants.directory.gateways import GatewaySeen
from tenants.errors import DatabaseUnavailable

MARGIN_S = 2.0
"""From the last start to the first chance to be taken for dead: what was sent has arrived by then."""


class Liveness:
    """Use from one event loop."""

    def __init__(self, gateway_id: str, stale_s: float, clock: Callable[[], float]) -> None:
        """`stale_s` must be larger than `MARGIN_S`; `clock` must run on while the process is stopped."""
        if not stale_s > MARGIN_S:
            raise ValueError(f"gateway_stale_s must be more than {MARGIN_S:g} seconds, not {stale_s:g}")
        self._gateway_id = gateway_id
        self._stale_s = stale_s
        self._clock = clock
        self._beaten_s = float("-inf")
        self._in_touch_since_s = float("inf")

    def beaten(self, asked_s: float, seen: Iterable[GatewaySeen]) -> list[GatewaySeen]:
        """Notes a heartbeat sent at `asked_s` and the registry's answer; returns the dead gateways."""
        if asked_s - self._beaten_s > self._stale_s:
            self._in_touch_since_s = asked_s
        self._beaten_s = asked_s
        if asked_s - self._in_touch_since_s < self._stale_s:
            return []
        return [row for row in seen if row.silent_s > self._stale_s and row.gateway_id != self._gateway_id]

    def require(self) -> None:
        """Raises `DatabaseUnavailable` if this gateway may have been taken for dead."""
        if self._clock() - self._beaten_s > self._stale_s - MARGIN_S:
            raise DatabaseUnavailable("this gateway was out of touch for too long: what waited here is void")
