"""Fair between tenants, short ones first inside each, and small ones past a large one that memory keeps.

Counters, lift and the choice of the tenant are those of `vtc.py`; inside a tenant the highest response ratio
goes next (`hrrn.py`). Tenants with equal counters go by who began to wait first.

Large entries (`QueueEntry.yields_cost`, see `room.py`) wait in a lane of their own. The first of the small
lane goes before the first of the large one while its tenant stands at most `yields_cost` (per weight of the
large one) above the large one's tenant, and less than `PATIENCE` x `yields_cost` was served since the large
one came. After that the two compare as entries of one lane would, and of equal tenants the large one goes
first.

Guarantee: the difference of two backlogged tenants is that of `vtc.py` plus twice `yields_cost` at worst; a
large entry waits at most `PATIENCE` x `yields_cost` longer than without lanes, whichever tenants send small
ones, and however many. Loses against hrrn on mean latency when tenants differ, and against first come, first
served on fairness between one tenant's own users.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from engine.entry import QueueEntry
from engine.scheduling.claims import ALL
from engine.scheduling.counters import scaled
from engine.scheduling.order.base import NeverInterrupts, Order, ServiceCountersLike, SizeKey
from engine.scheduling.order.hrrn import Hrrn
from engine.scheduling.order.lazy_heap import Key
from engine.scheduling.order.recent import Recent
from engine.scheduling.order.vtc import Vtc

PATIENCE = 2.5
"""With `lanes.YIELDS_PERMILLE`: until others got U, the cost of all that the cache holds."""


class Hybrid(NeverInterrupts):
    name = "hybrid"
    size_key: SizeKey = "prompt"
    claims = ALL

    def __init__(self, counters: ServiceCountersLike) -> None:
        self._counters = counters
        self._small = _Lane(counters)
        self._large = _Lane(counters)
        self._lane_of: dict[str, _Lane] = {}

    @property
    def operations(self) -> int:
        return self._small.operations + self._large.operations

    def add(self, entry: QueueEntry, *, front: bool = False) -> None:
        if entry.entry_id in self._lane_of:
            raise ValueError(f"entry {entry.entry_id!r} waits already")
        if not front and not self._waits(entry.tenant_id):
            self._lift(entry.tenant_id)
        lane = self._large if entry.yields_cost else self._small
        lane.add(entry, front=front)
        self._lane_of[entry.entry_id] = lane

    def peek(self, now_s: float) -> QueueEntry | None:
        if not len(self._large):
            return self._small.peek(now_s)
        small, large = self._small.peek(now_s), self._large.peek(now_s)
        if small is None or large is None:
            return small or large
        return small if self._goes_before(small, large) else large

    def pop(self, now_s: float) -> QueueEntry:
        entry = self.peek(now_s)
        if entry is None:
            raise IndexError("pop from an empty order")
        self.remove(entry.entry_id)
        return entry

    def remove(self, entry_id: str) -> QueueEntry | None:
        lane = self._lane_of.pop(entry_id, None)
        if lane is None:
            return None
        entry = lane.remove(entry_id)
        assert entry is not None, "the books disagree"
        if not self._waits(entry.tenant_id):
            self._counters.left_last = entry.tenant_id
        return entry

    def entries(self) -> Iterator[QueueEntry]:
        yield from self._small.entries()
        yield from self._large.entries()

    def rank(self, entry: QueueEntry, now_s: float) -> tuple[float, ...]:
        """Its tenant's counter, then minus its response ratio: how it stands in its lane."""
        return (self._large if entry.yields_cost else self._small).rank(entry, now_s)

    def clone(self, counters: ServiceCountersLike) -> Self:
        copy = type(self)(counters)
        copy._small = self._small.clone(counters)
        copy._large = self._large.clone(counters)
        copy._lane_of = {
            entry_id: copy._large if lane is self._large else copy._small
            for entry_id, lane in self._lane_of.items()
        }
        return copy

    def __len__(self) -> int:
        return len(self._lane_of)

    def _goes_before(self, small: QueueEntry, large: QueueEntry) -> bool:
        own, other = self._counters.value(small.tenant_id), self._counters.value(large.tenant_id)
        if self._large.waited_cost(large) < PATIENCE * large.yields_cost:
            return own <= other + scaled(large.yields_cost, large.weight)
        if small.tenant_id == large.tenant_id:
            return self._small.rank(small, 0.0) <= self._large.rank(large, 0.0)
        # Of equals the large one: newcomers are lifted to it, and there may always be newcomers.
        return own < other

    def _waits(self, tenant_id: str) -> bool:
        return self._small.has(tenant_id) or self._large.has(tenant_id)

    def _lift(self, tenant_id: str) -> None:
        """As `Vtc` does, over both lanes."""
        lowest = [tenant for tenant in (self._small.lowest(), self._large.lowest()) if tenant is not None]
        left = self._counters.left_last
        standards = lowest or ([left] if left is not None else [])
        if standards:
            first = min(standards, key=self._counters.value)
            self._counters.lift(tenant_id, self._counters.value(first), first)


class _Lane(Vtc):
    """As `Vtc`, with lines of `Hrrn`; who is lifted is decided for both lanes together."""

    def __init__(self, counters: ServiceCountersLike) -> None:
        super().__init__(counters)
        self._left: Recent[int] = Recent()
        """Of all lines: a line is gone when its last entry runs, and that may come back."""

    def rank(self, entry: QueueEntry, now_s: float) -> tuple[float, ...]:
        line = self._lines.get(entry.tenant_id) or self._new_line()
        return (self._counters.value(entry.tenant_id), *line.rank(entry, now_s))

    def waited_cost(self, entry: QueueEntry) -> int:
        """Cost tokens that others were served since `entry`, which waits here, came."""
        line = self._lines[entry.tenant_id]
        assert isinstance(line, Hrrn)
        return line.waited_cost(entry.entry_id)

    def has(self, tenant_id: str) -> bool:
        return tenant_id in self._lines

    def lowest(self) -> str | None:
        return self._heap.lowest(self._standing)

    def _standing(self, tenant_id: str) -> Key:
        return (self._counters.value(tenant_id), self._numbers[tenant_id])

    def _new_line(self) -> Order:
        return Hrrn(self._counters, left=self._left)

    def _line_like(self, line: Order) -> Order:
        assert isinstance(line, Hrrn)
        return line.clone_sharing(self._counters, self._left)

    def _comes(self, tenant_id: str, *, preempted: bool) -> None:
        """No lift here."""

    def _leaves(self, tenant_id: str) -> None:
        """Nor remembered."""

    def _empty(self, counters: ServiceCountersLike) -> Self:
        copy = type(self)(counters)
        copy._left = self._left.copy()
        return copy
