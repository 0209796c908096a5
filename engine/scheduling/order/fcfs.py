"""First come, first served: one line for all tenants. The baseline of the other orders.

No overtaking. Loses when a long prompt stands before many short ones, and when one tenant floods the line.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from engine.entry import QueueEntry
from engine.scheduling.claims import NO_STARVATION, SAFE, WORK_CONSERVATION
from engine.scheduling.order.base import NeverInterrupts, ServiceCountersLike


class Fcfs(NeverInterrupts):
    """One line, in order of arrival. Counters are not used."""

    name = "fcfs"
    claims = SAFE | {WORK_CONSERVATION, NO_STARVATION}

    def __init__(self, counters: ServiceCountersLike) -> None:
        self._line: OrderedDict[str, QueueEntry] = OrderedDict()
        self.operations = 0

    def add(self, entry: QueueEntry, *, front: bool = False) -> None:
        if entry.entry_id in self._line:
            raise ValueError(f"entry {entry.entry_id!r} waits already")
        self._line[entry.entry_id] = entry
        self.operations += 1
        if front:
            self._line.move_to_end(entry.entry_id, last=False)

    def peek(self, now_s: float) -> QueueEntry | None:
        return next(iter(self._line.values()), None)

    def pop(self, now_s: float) -> QueueEntry:
        if not self._line:
            raise IndexError("pop from an empty order")
        self.operations += 1
        return self._line.popitem(last=False)[1]

    def remove(self, entry_id: str) -> QueueEntry | None:
        return self._line.pop(entry_id, None)

    def entries(self) -> Iterator[QueueEntry]:
        return iter(self._line.values())

    def rank(self, entry: QueueEntry, now_s: float) -> tuple[float, ...]:
        return (entry.arrived_s,)

    def clone(self, counters: ServiceCountersLike) -> Fcfs:
        copy = Fcfs(counters)
        copy._line = self._line.copy()
        copy.operations = self.operations
        return copy

    def __len__(self) -> int:
        return len(self._line)
