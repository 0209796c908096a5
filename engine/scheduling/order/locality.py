"""Longest prefix match first, within one tenant.

Longest prefix match first, in groups: entries that share the start of their prompt (`QueueEntry.locality`) go
one after the other, so that what the first computes the next finds (SGLang's longest-prefix-match order;
DLPM, arXiv 2501.14312, uses it among the tenants that have credit).

1. The oldest entry, when it was passed over `MAX_PASSES` times or came back to the front (preempted).
2. Else the next of the group served last.
3. Else the entry with the most cached tokens, if it has any; else the oldest.

Guarantee: an entry behind n others is served after at most (n + 1) x (MAX_PASSES + 1) turns. Unbounded
prefix matching, by contrast, raised the p99 wait by 253 % in SGLang's test.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from engine.entry import QueueEntry
from engine.scheduling.claims import NO_STARVATION, SAFE, WORK_CONSERVATION
from engine.scheduling.order.base import NeverInterrupts, ServiceCountersLike
from engine.scheduling.order.lazy_heap import LazyHeap

MAX_PASSES = 8


class Locality(NeverInterrupts):
    name = "locality"
    claims = SAFE | {WORK_CONSERVATION, NO_STARVATION}

    def __init__(self, counters: ServiceCountersLike) -> None:
        self._line: OrderedDict[str, QueueEntry] = OrderedDict()
        self._groups: dict[int, OrderedDict[str, None]] = {}
        self._cached = LazyHeap()
        self._last_group = 0
        self._passes = 0
        """Turns that went past the oldest since it became the oldest."""
        self._came_back: set[str] = set()
        self._added = 0
        self._looked = 0

    @property
    def operations(self) -> int:
        return self._cached.operations + self._looked

    def add(self, entry: QueueEntry, *, front: bool = False) -> None:
        entry_id = entry.entry_id
        if entry_id in self._line:
            raise ValueError(f"entry {entry_id!r} waits already")
        self._line[entry_id] = entry
        if entry.locality:
            self._groups.setdefault(entry.locality, OrderedDict())[entry_id] = None
        if front:
            self._came_back.add(entry_id)
            self._line.move_to_end(entry_id, last=False)
            if entry.locality:
                self._groups[entry.locality].move_to_end(entry_id, last=False)
        elif entry.cached_tokens:
            self._added += 1
            self._cached.put(entry_id, (-entry.cached_tokens, self._added))
        self._looked += 1

    def peek(self, now_s: float) -> QueueEntry | None:
        entry_id = self._next()
        return None if entry_id is None else self._line[entry_id]

    def pop(self, now_s: float) -> QueueEntry:
        entry_id = self._next()
        if entry_id is None:
            raise IndexError("pop from an empty order")
        return self._take(entry_id)

    def remove(self, entry_id: str) -> QueueEntry | None:
        return self._take(entry_id) if entry_id in self._line else None

    def entries(self) -> Iterator[QueueEntry]:
        return iter(self._line.values())

    def rank(self, entry: QueueEntry, now_s: float) -> tuple[float, ...]:
        """Minus its cached tokens, then when it arrived."""
        return (-entry.cached_tokens, entry.arrived_s)

    def clone(self, counters: ServiceCountersLike) -> Locality:
        copy = Locality(counters)
        copy._line = self._line.copy()
        copy._groups = {locality: group.copy() for locality, group in self._groups.items()}
        copy._cached = self._cached.copy()
        copy._last_group = self._last_group
        copy._passes = self._passes
        copy._came_back = self._came_back.copy()
        copy._added = self._added
        copy._looked = self._looked
        return copy

    def __len__(self) -> int:
        return len(self._line)

    def _next(self) -> str | None:
        self._looked += 1
        oldest = next(iter(self._line), None)
        if oldest is None or self._passes >= MAX_PASSES or oldest in self._came_back:
            return oldest
        group = self._groups.get(self._last_group)
        if group:
            return next(iter(group))
        most_cached = self._cached.top()
        return oldest if most_cached is None else most_cached

    def _take(self, entry_id: str) -> QueueEntry:
        is_turn = entry_id == self._next()
        is_oldest = entry_id == next(iter(self._line))
        entry = self._line.pop(entry_id)
        if entry.locality:
            group = self._groups[entry.locality]
            del group[entry_id]
            if not group:
                del self._groups[entry.locality]
        if entry_id in self._cached:
            self._cached.drop(entry_id)
        self._came_back.discard(entry_id)
        if is_turn:
            self._last_group = entry.locality
        if is_oldest:
            self._passes = 0
        elif is_turn:
            self._passes += 1
        return entry
