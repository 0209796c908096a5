"""Reserved service by mClock tags: which tenant's reservation is due.

The first phase of mClock (Gulati, Merchant and Varman, OSDI 2010), with a tenant's cost tokens per second in
the place of I/O operations. A tenant with a reservation of `rate` has a tag, the instant when its next
request is due:

- a reservation is for the requests of one tier, by the tier that they asked for, or for those of all tiers;
  requests of other tiers are neither due by it nor counted against it;
- when a request comes and none of the reservation waits or runs on it, the tag is at least now: idle time
  earns nothing;
- a tenant with a request of its reservation waiting is *due* when its tag has come; the smallest tag goes
  first, then the tenant's name;
- a request that goes for this reason moves the tag by its cost / rate, and so do corrections of its cost.
  What a tenant gets by its weight does not (mClock subtracts it again, which is the same), so that its share
  of the rest never eats what it reserved;
- a tenant that was held back is owed at most `burst_s` of its rate.

Pure: time is passed in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.entry import QueueEntry
from gateway.flow.types import Ticket

MAX_IDLE_TAGS = 10_000
"""Kept tags of tenants that neither wait nor run on their reservation."""


@dataclass(slots=True)
class _Reserved:
    rate: float
    tag_s: float
    waiting: list[int]
    """By the requested tier."""
    tier: int | None
    """None: all tiers."""
    running: int = 0
    """On the reservation."""

    @property
    def num_waiting(self) -> int:
        if self.rate <= 0:
            return 0
        return sum(self.waiting) if self.tier is None else self.waiting[self.tier]

    def comes(self, now_s: float) -> None:
        if self.num_waiting == 0 and self.running == 0:
            self.tag_s = max(self.tag_s, now_s)


class MclockReservations:
    """Tags of all tenants that have a reservation, or had one when they came."""

    def __init__(self, burst_s: float) -> None:
        if not burst_s >= 0:
            raise ValueError(f"reservation_burst_s must be at least 0, not {burst_s!r}")
        self._burst_s = burst_s
        self._reserved: dict[str, _Reserved] = {}
        self._waiting: set[str] = set()

    def arrives(self, ticket: Ticket, now_s: float, already_waiting: Sequence[int]) -> None:
        """A request joins. `already_waiting`: its tenant's others, by the tier they asked for."""
        tenant_id, rate = ticket.entry.tenant_id, ticket.reserved_cost_per_s
        reserved = self._reserved.get(tenant_id)
        if reserved is None:
            if rate <= 0:
                return
            reserved = _Reserved(rate, now_s, list(already_waiting), ticket.reserved_tier)
            self._reserved[tenant_id] = reserved
        reserved.comes(now_s)
        reserved.rate, reserved.tier = rate, ticket.reserved_tier
        reserved.waiting[ticket.entry.tier] += 1
        self._list(tenant_id, reserved)

    def moves(self, tenant_id: str, before: int, after: int, now_s: float) -> None:
        """A waiting request of the tenant asked for the tier `before`, and asks for `after` now."""
        reserved = self._reserved.get(tenant_id)
        if reserved is None:
            return
        reserved.comes(now_s)
        reserved.waiting[before] -= 1
        reserved.waiting[after] += 1
        self._list(tenant_id, reserved)

    def leaves(self, entry: QueueEntry) -> None:
        reserved = self._reserved.get(entry.tenant_id)
        if reserved is None:
            return
        reserved.waiting[entry.tier] -= 1
        self._list(entry.tenant_id, reserved)

    def first_due(self, now_s: float, passed_over: set[str]) -> str | None:
        """The tenant whose reservation is due longest, without those that found no room."""
        due = [
            (self._reserved[tenant_id].tag_s, tenant_id)
            for tenant_id in self._waiting
            if self._reserved[tenant_id].tag_s <= now_s and tenant_id not in passed_over
        ]
        return min(due)[1] if due else None

    def tier(self, tenant_id: str) -> int | None:
        """None: all tiers."""
        return self._reserved[tenant_id].tier

    def granted(self, tenant_id: str, cost: int, now_s: float) -> None:
        reserved = self._reserved[tenant_id]
        reserved.tag_s = max(reserved.tag_s, now_s - self._burst_s) + cost / reserved.rate
        reserved.running += 1

    def corrected(self, tenant_id: str, cost: int) -> None:
        """Negative: less."""
        reserved = self._reserved.get(tenant_id)
        if reserved is not None and reserved.rate > 0:
            reserved.tag_s += cost / reserved.rate

    def ended(self, tenant_id: str, now_s: float) -> None:
        self._reserved[tenant_id].running -= 1
        if len(self._reserved) > MAX_IDLE_TAGS:
            self._reserved = {
                tenant: reserved
                for tenant, reserved in self._reserved.items()
                if any(reserved.waiting) or reserved.running or reserved.tag_s > now_s
            }

    def tag_s(self, tenant_id: str) -> float | None:
        """None: no reservation."""
        reserved = self._reserved.get(tenant_id)
        return None if reserved is None or reserved.rate <= 0 else reserved.tag_s

    def check(self, waiting: Mapping[str, Sequence[int]], running: Mapping[str, int]) -> None:
        """Raises `AssertionError` when its counts differ from these, by tenant; what waits also by tier."""
        for tenant_id, reserved in self._reserved.items():
            of_tenant = waiting.get(tenant_id, ())
            assert reserved.waiting == list(of_tenant) or not any((*reserved.waiting, *of_tenant)), (
                "waiting requests of a tenant with a reservation"
            )
            assert reserved.running == running.get(tenant_id, 0), "running on a reservation"
            assert (tenant_id in self._waiting) == (reserved.num_waiting > 0), "tenants that may be due"
        assert all(tenant_id in self._reserved for tenant_id in running), "a reservation was forgotten"

    def _list(self, tenant_id: str, reserved: _Reserved) -> None:
        if reserved.num_waiting:
            self._waiting.add(tenant_id)
        else:
            self._waiting.discard(tenant_id)
