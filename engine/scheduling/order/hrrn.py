"""Highest response ratio next: short ones first, but waiting counts.

Ratio = (waited + size) / size, size = prompt tokens that are still to be computed, waited = cost tokens that
others were served meanwhile. Brinch Hansen, 1971. Needs no length predictor.

Entries stand in classes of nearly equal size, each a line in order of arrival, and only the heads are
compared. Resolution: a class spans a factor of 2^(1/4), so the ratio of the picked entry is at least 2^(-1/4)
of the highest.

Guarantee: with at most n entries waiting, each of at most c cost tokens and at least s of size, one of size S
is served before others get about n x c x S / s. Loses where outputs, which it does not see, dominate; no
fairness between tenants by itself (see `hybrid.py`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from engine.entry import QueueEntry
from engine.scheduling.claims import NO_STARVATION, SAFE, WORK_CONSERVATION
from engine.scheduling.order.base import NeverInterrupts, ServiceCountersLike, SizeKey
from engine.scheduling.order.recent import Recent

CLASSES_PER_DOUBLING = 4


def prompt_size(entry: QueueEntry) -> int:
    return entry.uncached_tokens


def size_class(size: int) -> int:
    """Number of the size's class; `size` at least 1."""
    return int(CLASSES_PER_DOUBLING * math.log2(size))


@dataclass(frozen=True, slots=True)
class _HrrnWaiting:
    entry: QueueEntry
    size: int
    joined_cost: int
    number: int


class Hrrn(NeverInterrupts):
    """A line for each class of sizes."""

    name = "hrrn"
    size_key: SizeKey = "prompt"
    claims = SAFE | {WORK_CONSERVATION, NO_STARVATION}

    def __init__(
        self,
        counters: ServiceCountersLike,
        *,
        left: Recent[int] | None = None,
    ) -> None:
        """`left`: where to remember since when those have waited that may come back; shared by many lines."""
        self._counters = counters
        self._left: Recent[int] = Recent() if left is None else left
        self._lines: dict[int, OrderedDict[str, _HrrnWaiting]] = {}
        self._classes: dict[str, int] = {}
        self._added = 0
        self._added_front = 0
        self._known_best: tuple[int, _HrrnWaiting] | None = None
        """The best at a reading of the clock: asked for several times a step, while nothing changes."""
        self.operations = 0

    def add(self, entry: QueueEntry, *, front: bool = False) -> None:
        entry_id = entry.entry_id
        if entry_id in self._classes:
            raise ValueError(f"entry {entry_id!r} waits already")
        size = max(1, prompt_size(entry))
        number = size_class(size)
        line = self._lines.get(number)
        if line is None:
            line = self._lines[number] = OrderedDict()
        joined_cost = self._counters.served_cost
        if front:
            joined_cost = self._joined_cost(entry_id)
            if line:
                # It stands before the head, so it must not hide how long that one has waited.
                joined_cost = min(joined_cost, next(iter(line.values())).joined_cost)
            self._added_front += 1
            line[entry_id] = _HrrnWaiting(entry, size, joined_cost, -self._added_front)
            line.move_to_end(entry_id, last=False)
        else:
            self._added += 1
            line[entry_id] = _HrrnWaiting(entry, size, joined_cost, self._added)
        self._classes[entry_id] = number
        self._left.forget(entry_id)
        self._known_best = None
        self.operations += 1

    def peek(self, now_s: float) -> QueueEntry | None:
        best = self._best()
        return None if best is None else best.entry

    def pop(self, now_s: float) -> QueueEntry:
        best = self._best()
        if best is None:
            raise IndexError("pop from an empty order")
        return self._take(best.entry.entry_id)

    def remove(self, entry_id: str) -> QueueEntry | None:
        return self._take(entry_id) if entry_id in self._classes else None

    def entries(self) -> Iterator[QueueEntry]:
        for line in self._lines.values():
            for waiting in line.values():
                yield waiting.entry

    def rank(self, entry: QueueEntry, now_s: float) -> tuple[float, ...]:
        """Minus its response ratio."""
        size = max(1, prompt_size(entry))
        return (-(self.waited_cost(entry.entry_id) + size) / size,)

    def waited_cost(self, entry_id: str) -> int:
        """Cost tokens that were served since the entry, which waits or left not long ago, joined."""
        return max(0, self._counters.served_cost - self._joined_cost(entry_id))

    def clone(self, counters: ServiceCountersLike) -> Hrrn:
        return self.clone_sharing(counters, self._left.copy())

    def clone_sharing(self, counters: ServiceCountersLike, left: Recent[int]) -> Hrrn:
        """As `clone`, with a memory that other lines share."""
        copy = Hrrn(counters, left=left)
        copy._lines = {number: line.copy() for number, line in self._lines.items()}
        copy._classes = self._classes.copy()
        copy._added = self._added
        copy._added_front = self._added_front
        copy.operations = self.operations
        return copy

    def __len__(self) -> int:
        return len(self._classes)

    def _best(self) -> _HrrnWaiting | None:
        clock = self._counters.served_cost
        if self._known_best is not None and self._known_best[0] == clock:
            return self._known_best[1]
        best: _HrrnWaiting | None = None
        highest = 0.0
        for line in self._lines.values():
            head = next(iter(line.values()))
            # (waited + size) / size sorts as waited / size.
            ratio = max(0, clock - head.joined_cost) / head.size
            if best is None or ratio > highest or (ratio == highest and head.number < best.number):
                best, highest = head, ratio
        self.operations += len(self._lines)
        if best is not None:
            self._known_best = (clock, best)
        return best

    def _joined_cost(self, entry_id: str) -> int:
        """Of one that waits, of one that left not long ago, else now."""
        number = self._classes.get(entry_id)
        if number is not None:
            return self._lines[number][entry_id].joined_cost
        left = self._left.get(entry_id)
        return self._counters.served_cost if left is None else left

    def _take(self, entry_id: str) -> QueueEntry:
        number = self._classes.pop(entry_id)
        line = self._lines[number]
        waiting = line.pop(entry_id)
        if not line:
            del self._lines[number]
        self._left.note(entry_id, waiting.joined_cost)
        self._known_best = None
        self.operations += 1
        return waiting.entry
