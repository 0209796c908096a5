"""Base of orders in which tenants take turns, each with a line of its own: vtc, hybrid, drr and dlpm.

The counters are charged by others at any moment; see `TenantHeap` for how the heap finds out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from engine.entry import QueueEntry
from engine.scheduling.order.base import NeverInterrupts, Order, ServiceCountersLike
from engine.scheduling.order.lazy_heap import Key, TenantHeap


class ByTenant(NeverInterrupts):
    """The common part: a subclass says `name`, `claims`, `_standing` and `_new_line`."""

    name: str
    claims: frozenset[str]
    counts_turns = False
    """Whether `_picked` is called for every turn."""

    def __init__(self, counters: ServiceCountersLike) -> None:
        self._counters = counters
        self._lines: dict[str, Order] = {}
        self._numbers: dict[str, int] = {}
        self._begun = 0
        self._tenants: dict[str, str] = {}
        self._heap = TenantHeap(counters)
        self._ended_operations = 0

    @property
    def operations(self) -> int:
        in_lines = sum(line.operations for line in self._lines.values())
        return self._heap.operations + self._ended_operations + in_lines

    def add(self, entry: QueueEntry, *, front: bool = False) -> None:
        if entry.entry_id in self._tenants:
            raise ValueError(f"entry {entry.entry_id!r} waits already")
        tenant_id = entry.tenant_id
        line = self._lines.get(tenant_id)
        if line is None:
            self._comes(tenant_id, preempted=front)
            line = self._lines[tenant_id] = self._new_line()
            self._begun += 1
            self._numbers[tenant_id] = self._begun
        line.add(entry, front=front)
        self._tenants[entry.entry_id] = tenant_id
        self._heap.put(tenant_id, self._standing)

    def peek(self, now_s: float) -> QueueEntry | None:
        tenant_id = self._heap.lowest(self._standing)
        return None if tenant_id is None else self._lines[tenant_id].peek(now_s)

    def pop(self, now_s: float) -> QueueEntry:
        tenant_id = self._heap.lowest(self._standing)
        if tenant_id is None:
            raise IndexError("pop from an empty order")
        if self.counts_turns:
            self._picked(tenant_id)
        entry = self._lines[tenant_id].pop(now_s)
        self._taken(entry)
        return entry

    def remove(self, entry_id: str) -> QueueEntry | None:
        tenant_id = self._tenants.get(entry_id)
        if tenant_id is None:
            return None
        # Who runs the order may take what `peek` named by its name: a turn, too.
        if self.counts_turns and tenant_id == self._heap.lowest(self._standing):
            self._picked(tenant_id)
        entry = self._lines[tenant_id].remove(entry_id)
        assert entry is not None, "the books disagree"
        self._taken(entry)
        return entry

    def entries(self) -> Iterator[QueueEntry]:
        for line in self._lines.values():
            yield from line.entries()

    def clone(self, counters: ServiceCountersLike) -> Self:
        copy = self._empty(counters)
        copy._lines = {tenant_id: copy._line_like(line) for tenant_id, line in self._lines.items()}
        copy._numbers = self._numbers.copy()
        copy._begun = self._begun
        copy._tenants = self._tenants.copy()
        for tenant_id in copy._lines:
            copy._heap.put(tenant_id, copy._standing)
        return copy

    def __len__(self) -> int:
        return len(self._tenants)

    # ------------------------------------------------------------ what a subclass says

    def _standing(self, tenant_id: str) -> Key:
        """Where a waiting tenant stands, the smaller the earlier, its line's number last. It may rise at any
        time; it may fall only with the tenant's counter or with a change of its line."""
        raise NotImplementedError

    def _new_line(self) -> Order:
        raise NotImplementedError

    def _line_like(self, line: Order) -> Order:
        return line.clone(self._counters)

    def _comes(self, tenant_id: str, *, preempted: bool) -> None:
        """A tenant without a waiting entry is about to have one."""

    def _picked(self, tenant_id: str) -> None:
        """The lowest tenant's turn is taken; its line is as it was before. Asked where `counts_turns`."""

    def _leaves(self, tenant_id: str) -> None:
        """A tenant's last waiting entry is gone."""

    def _empty(self, counters: ServiceCountersLike) -> Self:
        """A new order with the same parameters and the same memory of tenants that do not wait."""
        return type(self)(counters)

    def _taken(self, entry: QueueEntry) -> None:
        tenant_id = self._tenants.pop(entry.entry_id)
        line = self._lines[tenant_id]
        if len(line):
            # Another head: a standing that looks at it may have fallen.
            self._heap.put(tenant_id, self._standing)
            return
        self._ended_operations += line.operations
        del self._lines[tenant_id]
        del self._numbers[tenant_id]
        self._heap.drop(tenant_id)
        self._leaves(tenant_id)
