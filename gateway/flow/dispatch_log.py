"""Bounded log of queue events, with the backlog at each dispatch, for audits of fairness."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

MAX_BACKLOG_TENANTS = 64
"""Per record: those with the smallest counters."""


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """One backlogged tenant of a lane: its counter, and the arrival of its oldest request there."""

    tenant_id: str
    counter: int
    oldest_arrived_s: float
    queued: int


class LogRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event. `counter` is the tenant's before the event's own charge."""

    event: str
    """`arrive`, `dispatch`, `correct` (another length foreseen), `leave` (without a turn) or `settle`."""
    at_s: float
    request_id: str
    tenant_id: str
    tier: int
    arrived_s: float
    weight: float
    counter: int
    predicted_cost: int = 0
    cost: int = 0
    """`settle`: cost tokens of what was really computed and emitted; `correct`: the charge from now on."""
    beyond_cost: int = 0
    """`settle`: the most that was charged meanwhile for output beyond what was predicted, as it came."""
    replica_id: str = ""
    backlog: list[Waiting] = []
    """`dispatch`: the tenants that wait in the same band and lane, the dispatched one included."""
    rule: str = ""
    """`dispatch`: `reservation` where it went before its tier's turn, `aged` where it did after a long wait;
    `owed` where its tenant had had less than its share; empty: by its tier and the policy's order."""


class DispatchLog:
    """The last `max_records` events, oldest first; `first_index` counts what was dropped."""

    def __init__(self, max_records: int) -> None:
        self._records: deque[LogRecord] = deque(maxlen=max_records)
        self._appended = 0

    def append(self, record: LogRecord) -> None:
        self._records.append(record)
        self._appended += 1

    @property
    def first_index(self) -> int:
        return self._appended - len(self._records)

    @property
    def next_index(self) -> int:
        return self._appended

    def since(self, index: int, most: int) -> Iterator[LogRecord]:
        start = max(0, index - self.first_index)
        for position in range(start, min(len(self._records), start + most)):
            yield self._records[position]
