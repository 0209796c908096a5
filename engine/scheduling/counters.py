"""Service counters: cost tokens x COUNTER_SCALE / weight of each tenant, as integers.

- A charge may be negative: predicted costs are corrected, and failed steps taken back.
- A tenant that goes idle keeps its counter; credit is taken away by the order, which lifts a returning tenant
  (see `engine/scheduling/order/vtc.py`).
- An unknown tenant stands at `floor`: 0 until more than `max_tenants` have been seen; then the smallest
  counters are forgotten and the floor rises to the largest forgotten one. Forgetting can cost a tenant a
  little credit, never hand it any.
- Falls are rare and logged for the orders' heaps (`LoweredLog`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from engine.entry import COUNTER_SCALE

MAX_TENANTS = 10_000
MAX_LOWERED = 1024
"""Falls that a reader may be behind; a slower one has to look at all tenants."""


def scaled(cost: int, weight: float) -> int:
    """What `cost` tokens add to the counter of a tenant of `weight`. Raises ValueError unless weight > 0."""
    if not weight > 0:
        raise ValueError(f"weight must be greater than 0, not {weight}")
    return round(cost * COUNTER_SCALE / weight)


class LoweredLog:
    """Log of tenants whose counter fell, for any number of readers, each at its own pace."""

    def __init__(self) -> None:
        self._tenants: list[str] = []
        self._dropped = 0
        """How many were forgotten before the first that is kept."""

    def note(self, tenant_id: str) -> None:
        self._tenants.append(tenant_id)
        if len(self._tenants) >= 2 * MAX_LOWERED:
            del self._tenants[:MAX_LOWERED]
            self._dropped += MAX_LOWERED

    def reader(self) -> Callable[[], Collection[str] | None]:
        """Each call of it returns those noted since the last; None when it came too late to know."""
        return _LoweredReader(self)

    @property
    def noted(self) -> int:
        return self._dropped + len(self._tenants)

    def since(self, position: int) -> Collection[str] | None:
        """What was noted after the first `position`; None: part of it is forgotten."""
        unread = position - self._dropped
        return self._tenants[unread:] if unread >= 0 else None


class _LoweredReader:
    """A class, because queues are pickled with their readers."""

    __slots__ = ("_log", "_position")

    def __init__(self, log: LoweredLog) -> None:
        self._log = log
        self._position = log.noted

    def __call__(self) -> Collection[str] | None:
        position, noted = self._position, self._log.noted
        if position == noted:
            return ()
        self._position = noted
        return self._log.since(position)


class ServiceCounters:
    """The counters of all tenants, shared by the orders of all tiers; implements `ServiceCountersLike`."""

    def __init__(self, *, max_tenants: int = MAX_TENANTS) -> None:
        if max_tenants < 4:
            raise ValueError(f"max_tenants must be at least 4, not {max_tenants}")
        self._values: dict[str, int] = {}
        self._max_tenants = max_tenants
        self._floor = 0
        self._served_cost = 0
        self._lowered = LoweredLog()
        self.left_last: str | None = None

    @property
    def served_cost(self) -> int:
        return self._served_cost

    @property
    def floor(self) -> int:
        return self._floor

    def value(self, tenant_id: str) -> int:
        return self._values.get(tenant_id, self._floor)

    def values(self) -> dict[str, int]:
        return dict(self._values)

    def charge(self, tenant_id: str, weight: float, cost: int) -> None:
        self.set(tenant_id, self.value(tenant_id) + scaled(cost, weight))
        self._served_cost += cost

    def charge_all(self, charges: Iterable[tuple[str, int]], cost: int) -> None:
        """Adds many charges at once: tenants' `scaled` costs, none negative, and the `cost` tokens of all."""
        values, floor = self._values, self._floor
        for tenant_id, amount in charges:
            values[tenant_id] = values.get(tenant_id, floor) + amount
        if len(values) > self._max_tenants:
            self._values, self._floor = forget_smallest(values, floor)
        self._served_cost += cost

    def lift(self, tenant_id: str, to: int, other_id: str = "") -> None:
        if to > self.value(tenant_id):
            self.set(tenant_id, to)

    def set(self, tenant_id: str, value: int) -> None:
        """Replaces the counter, for an owner elsewhere (a gateway)."""
        if value < self.value(tenant_id):
            self._lowered.note(tenant_id)
        self._values[tenant_id] = value
        if len(self._values) > self._max_tenants:
            self._values, self._floor = forget_smallest(self._values, self._floor)

    def lowered_reader(self) -> Callable[[], Collection[str] | None]:
        return self._lowered.reader()

    def clone(self) -> ServiceCounters:
        copy = ServiceCounters(max_tenants=self._max_tenants)
        copy._values = dict(self._values)
        copy._floor = self._floor
        copy._served_cost = self._served_cost
        copy.left_last = self.left_last
        return copy

    def __len__(self) -> int:
        return len(self._values)


def forget_smallest(values: dict[str, int], floor: int) -> tuple[dict[str, int], int]:
    """Drops the smallest quarter; returns what is left and the floor that stands for the dropped."""
    ranked = sorted(values.items(), key=lambda item: (item[1], item[0]))
    dropped = max(1, len(ranked) // 4)
    return dict(ranked[dropped:]), max(floor, ranked[dropped - 1][1])
