"""Base of orders whose key is fixed while an entry waits.

What sjf, srpt, las, edf and priority have in common: one heap. Ageing needs no re-sorting. With
key = size - ageing x waited, and waited = now - joined, the term ageing x now is the same for all, so
size + ageing x joined sorts alike and never changes.

Equal keys go by arrival; an entry that returns to the front goes before its equals. What an order fixes
when an entry joins (its *terms*) is remembered while it runs, so that a preempted one returns with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from engine.entry import QueueEntry
from engine.scheduling.order.base import ServiceCountersLike
from engine.scheduling.order.lazy_heap import LazyHeap
from engine.scheduling.order.recent import Recent

Terms = tuple[float, ...]


class Keyed:
    """The common part: a subclass says `name`, `claims`, `_terms` and `_key`."""

    name: str
    claims: frozenset[str]
    interrupts = False

    def __init__(self, counters: ServiceCountersLike) -> None:
        self._counters = counters
        self._heap = LazyHeap()
        self._waiting: dict[str, tuple[QueueEntry, Terms]] = {}
        self._left: Recent[Terms] = Recent()
        self._added = 0
        self._added_front = 0

    @property
    def operations(self) -> int:
        """Heap levels passed so far."""
        return self._heap.operations

    def add(self, entry: QueueEntry, *, front: bool = False) -> None:
        """Joins by its key. Raises ValueError for an entry that waits already."""
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
        """The smallest key."""
        entry_id = self._heap.top()
        return None if entry_id is None else self._waiting[entry_id][0]

    def pop(self, now_s: float) -> QueueEntry:
        """Takes what `peek` names. Raises IndexError when empty."""
        entry_id = self._heap.top()
        if entry_id is None:
            raise IndexError("pop from an empty order")
        return self._take(entry_id)

    def remove(self, entry_id: str) -> QueueEntry | None:
        """Takes an entry out wherever it stands; None when it does not wait."""
        return self._take(entry_id) if entry_id in self._waiting else None

    def entries(self) -> Iterator[QueueEntry]:
        """All waiting entries."""
        return (entry for entry, _ in self._waiting.values())

    def rank(self, entry: QueueEntry, now_s: float) -> tuple[float, ...]:
        """Its key."""
        return (self._key_of(entry),)

    def outranks(self, waiting: QueueEntry, running: QueueEntry, now_s: float) -> bool:
        """Never: this order does not interrupt."""
        return False

    def clone(self, counters: ServiceCountersLike) -> Self:
        """An independent copy over `counters`."""
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
        """A new order with the same parameters."""
        return type(self)(counters)

    # ------------------------------------------------------------ inside

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
