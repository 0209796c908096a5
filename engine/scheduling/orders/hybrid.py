"""Fair between tenants, short ones first inside each: vtc with a line of hrrn for every tenant.

The counters, the lift and the choice of the tenant are those of `vtc.py`, and so are its bound and its
promise to everybody: neither asks which of a tenant's own entries is served. Inside a tenant the highest
response ratio goes next (`hrrn.py`), so a tenant's long prompts delay its short ones little and starve not.
Tenants with equal counters go by who began to wait first.

Loses against hrrn on mean latency when tenants differ (a turn may go to a long request of a tenant that has
had little), and against first come, first served on fairness between one tenant's own users.
"""

from __future__ import annotations

from typing import Self

from engine.scheduling.order import Entry, Order, ServiceCountersLike
from engine.scheduling.orders.hrrn import Hrrn
from engine.scheduling.orders.lazy_heap import Key
from engine.scheduling.orders.recent import Recent
from engine.scheduling.orders.vtc import Vtc


class Hybrid(Vtc):
    """As `Vtc`, with lines of `Hrrn`."""

    name = "hybrid"

    def __init__(self, counters: ServiceCountersLike) -> None:
        super().__init__(counters)
        self._left: Recent[int] = Recent()
        """Of all tenants' lines: a line is gone when its last entry runs, and that may come back."""

    def rank(self, entry: Entry, now_s: float) -> tuple[float, ...]:
        """Its tenant's counter, then minus its response ratio."""
        line = self._lines.get(entry.tenant_id) or self._new_line()
        return (self._counters.value(entry.tenant_id), *line.rank(entry, now_s))

    def _standing(self, tenant_id: str) -> Key:
        return (self._counters.value(tenant_id), self._numbers[tenant_id])

    def _new_line(self) -> Order:
        return Hrrn(self._counters, left=self._left)

    def _line_like(self, line: Order) -> Order:
        assert isinstance(line, Hrrn)
        return line.clone_sharing(self._counters, self._left)

    def _empty(self, counters: ServiceCountersLike) -> Self:
        copy = super()._empty(counters)
        copy._left = self._left.copy()
        return copy
