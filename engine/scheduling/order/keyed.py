"""Base of orders whose key is fixed while an entry waits, in one heap: sjf, srpt, las, edf and priority.

Ageing needs no re-sorting: with key = size - ageing x waited, the term ageing x now is the same for all, so
size + ageing x joined sorts alike. Equal keys go by arrival; an entry that returns to the front goes before
its equals. What an order fixes when an entry joins (its *terms*) is remembered while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from engine.entry import QueueEntry
from engine.scheduling.order.base import NeverInterrupts, ServiceCountersLike
from engine.scheduling.order.lazy_heap import LazyHeap
from engine.scheduling.order.recent import Recent

Terms = tuple[float, ...]


class Keyed(NeverInterrupts):
    """The common part: a subclass says `name`, `claims`, `_terms` and `_key`."""

    name: str
    claims: frozenset[str]

    def __init__(self, counters: ServiceCountersLike) -> None:
        self._counters = counters
        self._heap = LazyHeap()
        self._waiting: dict[str, tuple[QueueEntry, Terms]] = {}
        self._left: Recent[Terms] = Recent()
        self._added = 0
        self._added_front = 0

    @property
    def operations(self) -> int:
        return self._heap.operations

    def add(self, entry: QueueEntry, *, front: bool = False) -> None:
        if entry.entry_id in self._waiting:
            raise ValueError(f"entry {entry.entry_id!r} waits already")
        known = self._left.get(entry.entry_id) if front else None
        terms = self._terms(entry) if known is None else known
        self._left.forget(entry.entry_id)
        if front:
            self._added_front += 1
            number = -self._added_front
        else:
            self._added += 1
            number = self._added
        self._waiting[entry.entry_id] = (entry, terms)
        self._heap.put(entry.entry_id, (self._key(entry, terms), number))

    def peek(self, now_s: float) -> QueueEntry | None:
        entry_id = self._heap.top()
        return None if entry_id is None else self._waiting[entry_id][0]

    def pop(self, now_s: float) -> QueueEntry:
        entry_id = self._heap.top()
        if entry_id is None:
            raise IndexError("pop from an empty order")
        return self._take(entry_id)

    def remove(self, entry_id: str) -> QueueEntry | None:
        return self._take(entry_id) if entry_id in self._waiting else None

    def entries(self) -> Iterator[QueueEntry]:
        return (entry for entry, _ in self._waiting.values())

    def rank(self, entry: QueueEntry, now_s: float) -> tuple[float, ...]:
        return (self._key_of(entry),)

    def clone(self, counters: ServiceCountersLike) -> Self:
        copy = self._empty(counters)
        copy._heap = self._heap.copy()
        copy._waiting = self._waiting.copy()
        copy._left = self._left.copy()
        copy._added = self._added
        copy._added_front = self._added_front
        return copy

    def __len__(self) -> int:
        return len(self._waiting)

    # ------------------------------------------------------------ what a subclass says

    def _terms(self, entry: QueueEntry) -> Terms:
        """What is fixed of the key when an entry joins for the first time."""
        return ()

    def _key(self, entry: QueueEntry, terms: Terms) -> float:
        """The smaller the earlier; the same as long as the entry waits."""
        raise NotImplementedError

    def _empty(self, counters: ServiceCountersLike) -> Self:
        return type(self)(counters)

    def _key_of(self, entry: QueueEntry) -> float:
        """Of any entry: one that runs keeps the terms with which it waited."""
        waits = self._waiting.get(entry.entry_id)
        terms = waits[1] if waits is not None else self._left.get(entry.entry_id)
        return self._key(entry, self._terms(entry) if terms is None else terms)

    def _take(self, entry_id: str) -> QueueEntry:
        entry, terms = self._waiting.pop(entry_id)
        self._heap.drop(entry_id)
        self._left.note(entry_id, terms)
        return entry


class KeyedByDeadline(Keyed):
    """Keyed by what is promised between tenants, and by what clients ask for inside a tenant.

    The key of an entry is a position of its tenant. Who is next of a tenant goes by `_own_key`, in which a
    client's own deadline counts; it takes the tenant's first position, and the entry that brought that gets
    the other's. So a tenant has the same positions at any time, whatever its clients ask for.
    """

    def __init__(self, counters: ServiceCountersLike) -> None:
        super().__init__(counters)
        self._entries_of: dict[str, dict[str, None]] = {}
        self._own: dict[str, LazyHeap] = {}
        """Of tenants whose clients have asked for something since they began to wait: entries by own key."""
        self._ended_operations = 0

    @property
    def operations(self) -> int:
        in_tenants = sum(heap.operations for heap in self._own.values())
        return self._heap.operations + self._ended_operations + in_tenants

    def add(self, entry: QueueEntry, *, front: bool = False) -> None:
        super().add(entry, front=front)
        tenant_id, (key, number) = entry.tenant_id, self._heap.key(entry.entry_id)
        own_key = self._own_key(entry, key)
        own = self._own.get(tenant_id)
        if own is None and own_key != key:
            # Until now its entries went by their positions, and each has the one that it brought.
            own = self._own[tenant_id] = LazyHeap()
            for other in self._entries_of.get(tenant_id, ()):
                own.put(other, self._heap.key(other))
        if own is not None:
            own.put(entry.entry_id, (own_key, number))
        self._entries_of.setdefault(tenant_id, {})[entry.entry_id] = None

    def peek(self, now_s: float) -> QueueEntry | None:
        first = self._first()
        return None if first is None else self._waiting[first[0]][0]

    def pop(self, now_s: float) -> QueueEntry:
        first = self._first()
        if first is None:
            raise IndexError("pop from an empty order")
        return self._take(first[0])

    def clone(self, counters: ServiceCountersLike) -> Self:
        copy = super().clone(counters)
        copy._entries_of = {tenant_id: ids.copy() for tenant_id, ids in self._entries_of.items()}
        copy._own = {tenant_id: heap.copy() for tenant_id, heap in self._own.items()}
        copy._ended_operations = self._ended_operations
        return copy

    # ------------------------------------------------------------ what a subclass says

    def _own_key(self, entry: QueueEntry, key: float) -> float:
        """`key` as it would be were what its client asks for promised; not above what is promised."""
        raise NotImplementedError

    def _terms_at(self, entry: QueueEntry, terms: Terms, key: float) -> Terms:
        """`terms` changed so that `key` is the entry's."""
        raise NotImplementedError

    def _first(self) -> tuple[str, str] | None:
        """The entry that is next, and the one that brought the position it takes."""
        position = self._heap.top()
        if position is None:
            return None
        own = self._own.get(self._waiting[position][0].tenant_id)
        first = position if own is None else own.top()
        assert first is not None, "the books disagree"
        return first, position

    def _key_of(self, entry: QueueEntry) -> float:
        """The next entry has the key of the position that it takes."""
        first = self._first()
        if first is not None and first[0] == entry.entry_id:
            key: float = self._heap.key(first[1])[0]
            return key
        return super()._key_of(entry)

    def _take(self, entry_id: str) -> QueueEntry:
        first = self._first()
        if first is not None and first[0] == entry_id != first[1]:
            self._swap(entry_id, first[1])
        entry = super()._take(entry_id)
        own, ids = self._own.get(entry.tenant_id), self._entries_of[entry.tenant_id]
        del ids[entry_id]
        if not ids:
            del self._entries_of[entry.tenant_id]
        if own is not None:
            own.drop(entry_id)
            if not ids:
                self._ended_operations += self._own.pop(entry.tenant_id).operations
        return entry

    def _swap(self, one: str, other: str) -> None:
        keys = self._heap.key(one), self._heap.key(other)
        for entry_id, key in zip((other, one), keys, strict=True):
            entry, terms = self._waiting[entry_id]
            self._waiting[entry_id] = (entry, self._terms_at(entry, terms, key[0]))
            self._heap.put(entry_id, key)
