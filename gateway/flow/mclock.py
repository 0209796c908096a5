"""Reserved service by mClock tags: which tenant's reservation is due.

The first phase of mClock (Gulati, Merchant and Varman, OSDI 2010), with a tenant's cost tokens per second in
the place of I/O operations. A tenant with a reservation of `rate` has a tag, the instant when its next
request is due:

- at an arrival of a tenant with nothing waiting, and nothing running on its reservation, the tag is at least
  now: idle time earns nothing;
- a tenant that waits is *due* when its tag has come; the smallest tag goes first, then the tenant's name;
- a request that goes for this reason moves the tag by its cost / rate, and so do corrections of its cost.
  What a tenant gets by its weight does not (mClock subtracts it again, which is the same), so that its share
  of the rest never eats what it reserved;
- a tenant that was held back is owed at most `burst_s` of its rate.

Pure: time is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_IDLE_TAGS = 10_000
"""Tags of tenants that neither wait nor run on their reservation; those that have come say nothing."""


@dataclass(slots=True)
class _Reserved:
    rate: float
    """Cost tokens per second."""
    tag_s: float
    waiting: int = 0
    running: int = 0
    """On the reservation."""


class MclockReservations:
    """The tags of all tenants that have a reservation, or had one when they came."""

    def __init__(self, burst_s: float) -> None:
        """Raises ValueError for a negative burst."""
        if not burst_s >= 0:
            raise ValueError(f"reservation_burst_s must be at least 0, not {burst_s!r}")
        self._burst_s = burst_s
        self._reserved: dict[str, _Reserved] = {}
        self._waiting: set[str] = set()
        """Tenants with a reservation that wait."""

    def arrives(self, tenant_id: str, rate: float, now_s: float, already_waiting: int) -> None:
        """A request of the tenant joins the queue, where `already_waiting` of it stand; `rate` is what the
        tenant has reserved as of now, in cost tokens per second."""
        reserved = self._reserved.get(tenant_id)
        if reserved is None:
            if rate <= 0:
                return
            reserved = self._reserved[tenant_id] = _Reserved(rate, now_s, already_waiting)
        elif reserved.waiting == 0 and reserved.running == 0:
            reserved.tag_s = max(reserved.tag_s, now_s)
        reserved.rate = rate
        reserved.waiting += 1
        if rate > 0:
            self._waiting.add(tenant_id)
        else:
            self._waiting.discard(tenant_id)

    def leaves(self, tenant_id: str) -> None:
        """A request of the tenant left the queue, with a turn or without."""
        reserved = self._reserved.get(tenant_id)
        if reserved is None:
            return
        reserved.waiting -= 1
        if reserved.waiting == 0:
            self._waiting.discard(tenant_id)

    def first_due(self, now_s: float, passed_over: set[str]) -> str | None:
        """The tenant whose reservation is due longest, without those that found no room."""
        due = [
            (self._reserved[tenant_id].tag_s, tenant_id)
            for tenant_id in self._waiting
            if self._reserved[tenant_id].tag_s <= now_s and tenant_id not in passed_over
        ]
        return min(due)[1] if due else None

    def granted(self, tenant_id: str, cost: int, now_s: float) -> None:
        """A request of `cost` tokens got its turn because it was due."""
        reserved = self._reserved[tenant_id]
        reserved.tag_s = max(reserved.tag_s, now_s - self._burst_s) + cost / reserved.rate
        reserved.running += 1

    def corrected(self, tenant_id: str, cost: int) -> None:
        """Corrects the cost of a running request by `cost` (negative: less)."""
        reserved = self._reserved.get(tenant_id)
        if reserved is not None and reserved.rate > 0:
            reserved.tag_s += cost / reserved.rate

    def ended(self, tenant_id: str, now_s: float) -> None:
        """A request that ran on the reservation is over."""
        self._reserved[tenant_id].running -= 1
        if len(self._reserved) > MAX_IDLE_TAGS:
            self._reserved = {
                each: reserved
                for each, reserved in self._reserved.items()
                if reserved.waiting or reserved.running or reserved.tag_s > now_s
            }

    def tag_s(self, tenant_id: str) -> float | None:
        """When the tenant is due next; None: it has no reservation."""
        reserved = self._reserved.get(tenant_id)
        return None if reserved is None or reserved.rate <= 0 else reserved.tag_s

    def check(self, waiting: dict[str, int], running: dict[str, int]) -> None:
        """Raises `AssertionError` when its counts differ from these, by tenant."""
        for tenant_id, reserved in self._reserved.items():
            assert reserved.waiting == waiting.get(tenant_id, 0), "waiting on a reservation"
            assert reserved.running == running.get(tenant_id, 0), "running on a reservation"
            is_listed = reserved.rate > 0 and reserved.waiting > 0
            assert (tenant_id in self._waiting) == is_listed, "tenants that may be due"
        assert all(tenant_id in self._reserved for tenant_id in running), "a reservation was forgotten"
