"""Heap by name with lazy deletion and changing keys.

A binary heap in which what is dropped or replaced stays until it surfaces; when more than half of it is
stale it is built anew. Everything is O(log n) amortised.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

from engine.scheduling.order.base import ServiceCountersLike

Key = tuple[float, ...]
"""Compared from the left, all of one heap of one length. Keys should differ, or the smaller name wins."""
_Item = tuple[Any, ...]
"""A key with its name behind it: in one tuple, because the heap compares them ten times a turn."""


class LazyHeap:
    """Names by key, each once."""

    def __init__(self) -> None:
        self._heap: list[_Item] = []
        self._items: dict[str, _Item] = {}
        """By name; whatever else the heap holds is stale."""
        self.operations = 0

    def put(self, name: str, key: Key) -> None:
        item = (*key, name)
        if self._items.get(name) == item:
            return
        self._items[name] = item
        heapq.heappush(self._heap, item)
        self._count()
        self._clean()

    def drop(self, name: str) -> None:
        """Takes the name out. Raises KeyError when it is not there."""
        del self._items[name]
        self._clean()

    def top(self) -> str | None:
        """The name of the smallest key; None when there is none."""
        while self._heap:
            item = self._heap[0]
            name: str = item[-1]
            if self._items.get(name) == item:
                return name
            self._count()
            heapq.heappop(self._heap)
        return None

    def replace_top(self, key: Key) -> None:
        """Gives the name that `top` just named another key."""
        name = self._heap[0][-1]
        item = self._items[name] = (*key, name)
        self._count()
        heapq.heapreplace(self._heap, item)

    def key(self, name: str) -> Key:
        return self._items[name][:-1]

    def copy(self) -> LazyHeap:
        copy = LazyHeap()
        copy._heap = self._heap.copy()
        copy._items = self._items.copy()
        copy.operations = self.operations
        return copy

    def __contains__(self, name: str) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def _count(self) -> None:
        self.operations += len(self._heap).bit_length()

    def _clean(self) -> None:
        if len(self._heap) > 2 * len(self._items) + 64:
            self._heap = list(self._items.values())
            heapq.heapify(self._heap)
            self.operations += len(self._heap)


Standing = Callable[[str], Key]
"""Tenant id -> its key now: its counter, or what follows from it, first; something unique last."""


class TenantHeap:
    """The waiting tenants by standing, though their counters are charged by others.

    A standing that rose is looked at again when it surfaces, so a charge costs nothing until it matters.
    Falls are read from the counters; a standing that fell for another reason is reported with `put`.
    """

    def __init__(self, counters: ServiceCountersLike) -> None:
        self._heap = LazyHeap()
        self._read_lowered = counters.lowered_reader()

    @property
    def operations(self) -> int:
        return self._heap.operations

    def put(self, tenant_id: str, standing: Standing) -> None:
        """Adds a tenant, or looks whether its standing fell."""
        now = standing(tenant_id)
        # One that rose is found out when it surfaces.
        if tenant_id not in self._heap or now < self._heap.key(tenant_id):
            self._heap.put(tenant_id, now)

    def drop(self, tenant_id: str) -> None:
        """Takes a tenant out. Raises KeyError when it is not there."""
        self._heap.drop(tenant_id)

    def lowest(self, standing: Standing) -> str | None:
        """The tenant that stands lowest now; None when there is none."""
        heap = self._heap
        lowered = self._read_lowered()
        for tenant_id in list(heap) if lowered is None else lowered:
            if tenant_id in heap:
                self.put(tenant_id, standing)
        while (lowest := heap.top()) is not None:
            now = standing(lowest)
            if now == heap.key(lowest):
                return lowest
            heap.replace_top(now)
        return None

    def __len__(self) -> int:
        return len(self._heap)
