"""Which end users of a tenant have counters: a bounded number of them.

A further one replaces the one at rest for longest (`rules.rest_us`: dropping its counters changes nothing,
unless the clock steps back over that instant: until then no other begins). `lua/common.lua` does the same."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Record:
    holds: int = 0
    """Requests that hold on its counters."""
    rest_us: int = 0
    """When its counters are at rest, once nothing is held on them."""
    names: set[str] = field(default_factory=set)
    """Its counters' limits, by identity."""


class EndUsers:
    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        # (rest, end user) of those without holds; what has changed since leaves stale entries.
        self._resting: list[tuple[int, str]] = []
        self.forgotten_us = 0
        """When the last dropped one had come to rest."""

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, user: str) -> bool:
        return user in self._records

    def longest_at_rest(self) -> tuple[int, str] | None:
        """The end user without holds whose rest begins first, and when; None: all hold."""
        while self._resting:
            rest_us, user = self._resting[0]
            record = self._records.get(user)
            if record is not None and not record.holds and record.rest_us == rest_us:
                return rest_us, user
            heapq.heappop(self._resting)
        return None

    def holds(self, user: str, names: list[str]) -> None:
        record = self._records.setdefault(user, _Record())
        record.holds += 1
        record.names.update(names)

    def released(self, user: str) -> None:
        self._records[user].holds -= 1
        self._rests(user)

    def used(self, user: str, name: str, rest_us: int) -> None:
        record = self._records.setdefault(user, _Record())
        record.names.add(name)
        record.rest_us = max(record.rest_us, rest_us)
        self._rests(user)

    def forget(self, user: str) -> set[str]:
        """Returns the identities of its limits, whose counters go with it."""
        record = self._records.pop(user)
        self.forgotten_us = max(self.forgotten_us, record.rest_us)
        return record.names

    def _rests(self, user: str) -> None:
        record = self._records[user]
        if not record.holds:
            heapq.heappush(self._resting, (record.rest_us, user))
        if len(self._resting) > 64 and len(self._resting) > 2 * len(self._records):
            self._resting = [
                (record.rest_us, user) for user, record in self._records.items() if not record.holds
            ]
            heapq.heapify(self._resting)
