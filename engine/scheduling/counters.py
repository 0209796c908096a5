"""How much service has each tenant had, per weight?

One integer a tenant: cost tokens x COUNTER_SCALE / weight. Integers, so that a charge and its correction
cancel exactly and sums never drift.

Decisions that are easy to get silently, taken here:

- A charge may be negative. A gateway charges the predicted cost when it dispatches and corrects it when it
  knows better; an engine takes back what a failed step did not compute.
- A tenant that goes idle keeps its counter, so debt is never forgiven. Credit is taken away by the order,
  which lifts a returning tenant (see `vtc.py`).
- A tenant nobody knows stands at `floor`. The floor is 0 until more than `max_tenants` have been seen; then
  the smallest counters are forgotten and the floor rises to the largest forgotten one. Forgetting can cost a
  tenant a little credit, never hand it any.
"""

from __future__ import annotations

from engine.scheduling.order import COUNTER_SCALE

MAX_TENANTS = 10_000


def scaled(cost: int, weight: float) -> int:
    """What `cost` tokens add to the counter of a tenant of `weight`. Raises ValueError unless weight > 0."""
    if not weight > 0:
        raise ValueError(f"weight must be greater than 0, not {weight}")
    return round(cost * COUNTER_SCALE / weight)


class ServiceCounters:
    """The counters of all tenants, shared by the orders of all tiers; implements `ServiceCountersLike`."""

    def __init__(self, *, max_tenants: int = MAX_TENANTS) -> None:
        if max_tenants < 4:
            raise ValueError(f"max_tenants must be at least 4, not {max_tenants}")
        self._values: dict[str, int] = {}
        self._max_tenants = max_tenants
        self._floor = 0

    @property
    def floor(self) -> int:
        """The counter of a tenant that is not kept by name."""
        return self._floor

    def value(self, tenant_id: str) -> int:
        """The tenant's counter."""
        return self._values.get(tenant_id, self._floor)

    def values(self) -> dict[str, int]:
        """All counters kept by name (a copy)."""
        return dict(self._values)

    def charge(self, tenant_id: str, weight: float, cost: int) -> None:
        """Adds `cost` tokens (negative: a correction) at `weight`."""
        self.set(tenant_id, self.value(tenant_id) + scaled(cost, weight))

    def lift(self, tenant_id: str, to: int) -> None:
        """Raises a returning tenant's counter; never lowers it."""
        if to > self.value(tenant_id):
            self.set(tenant_id, to)

    def set(self, tenant_id: str, value: int) -> None:
        """Replaces the counter: what an owner elsewhere says (an engine told by its gateway)."""
        self._values[tenant_id] = value
        if len(self._values) > self._max_tenants:
            self._values, self._floor = forget_smallest(self._values, self._floor)

    def clone(self) -> ServiceCounters:
        """An independent copy, for replays."""
        copy = ServiceCounters(max_tenants=self._max_tenants)
        copy._values = dict(self._values)
        copy._floor = self._floor
        return copy

    def __len__(self) -> int:
        return len(self._values)


def forget_smallest(values: dict[str, int], floor: int) -> tuple[dict[str, int], int]:
    """Drops the smallest quarter; returns what is left and the floor that stands for the dropped."""
    ranked = sorted(values.items(), key=lambda item: (item[1], item[0]))
    dropped = max(1, len(ranked) // 4)
    return dict(ranked[dropped:]), max(floor, ranked[dropped - 1][1])
