"""Limits connections, in all and per address, and chooses which gives way. Pure.

A connection without a request *rests*: it is new, its next head is still arriving, or it is kept alive. If
all places are taken, a new one replaces the one that has rested longest, preferably one that never sent a
valid key; if none rests here it is refused. O(1) per request; `overdue` returns those that rest too long.
Connections of other workers of the port count, but are not replaced from here.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gateway import errors
from gateway.workers.tally import ALONE, Counts

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds before any key is read."""

    max_connections: int
    max_per_address: int
    """Connections; concurrent requests through a trusted proxy."""
    head_timeout_s: float
    idle_timeout_s: float
    max_head_bytes: int = 2**16
    """Request line and headers; more is refused with 431, as are more header fields."""
    max_headers: int = 128


class ConnectionTable(Generic[T]):
    def __init__(self, limits: ConnectionLimits, shared: Counts = ALONE) -> None:
        self.limits = limits
        self._shared = shared
        self._open: dict[T, Hashable] = {}
        """By connection: its address; `UNCOUNTED` of a trusted proxy's."""
        self._resting: tuple[dict[T, float], dict[T, float]] = ({}, {})
        """Deadlines of resting connections: without a valid key so far, and the others."""
        self._of_address: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: T, address: Hashable, until_s: float) -> T | None:
        """Takes one that rests until `until_s`; returns the one replaced. Raises `ApiError` (503, 429)."""
        if address is not UNCOUNTED:
            self.take(address, through_proxy=False)
        displaced = None
        if len(self._open) + self._shared.add(ALL, 1) >= self.limits.max_connections:
            displaced = next((connection for group in self._resting for connection in group), None)
            if displaced is None:
                self._shared.add(ALL, -1)
                self.give_back(address)
                raise errors.too_many_connections(most=self.limits.max_connections)
            self.leave(displaced)
        self._open[connection] = address
        self._resting[False][connection] = until_s
        return displaced

    def leave(self, connection: T) -> None:
        if connection in self._open:
            self._shared.add(ALL, -1)
            self.give_back(self._open.pop(connection))
            self.work(connection)

    def rest(self, connection: T, until_s: float, *, is_known: bool) -> None:
        """`is_known`: it has sent a valid key. One that rests already keeps its place in the order."""
        if connection in self._open:
            self._resting[is_known][connection] = until_s

    def work(self, connection: T) -> None:
        for group in self._resting:
            group.pop(connection, None)

    def overdue(self, now_s: float) -> list[T]:
        return [
            connection for group in self._resting for connection, until_s in group.items() if until_s <= now_s
        ]

    def take(self, address: Hashable, *, through_proxy: bool) -> None:
        """Counts one for the address until `give_back`. Raises `ApiError` (429)."""
        used = self._of_address.get(address, 0)
        if used + self._shared.add(address, 1) >= self.limits.max_per_address:
            self._shared.add(address, -1)
            raise errors.address_has_too_many(self.limits.max_per_address, through_proxy=through_proxy)
        self._of_address[address] = used + 1

    def give_back(self, address: Hashable) -> None:
        if address is UNCOUNTED:
            return
        self._shared.add(address, -1)
        left = self._of_address.get(address, 0) - 1
        if left > 0:
            self._of_address[address] = left
        else:
            self._of_address.pop(address, None)


UNCOUNTED = object()
ALL = "all"
"""In the shared counts, beside the addresses."""
