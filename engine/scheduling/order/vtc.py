"""Virtual token counter: the backlogged tenant with the least service per weight goes next.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. While two tenants are both backlogged
their service per weight differs by at most 2U, U = max(input cost of the longest prompt, output cost of the
tokens in the running batch), for however long.

- **Select**: smallest counter among tenants with a waiting entry (ties: the earliest arrival), its oldest
  entry. The caller stops where that one does not fit and does not look for one that does: skipping
  would void the bound.
- **Lift**, when a tenant without a waiting entry adds one: to the smallest counter of the waiting tenants; if
  none waits, to the counter of the tenant that left the queue last. So idle time earns nothing. Both
  branches only raise.
- A preempted entry (`front`) goes back to the head of its tenant's line and lifts nothing: its tenant was not
  idle, its work was taken away.
- Fair by tenant: keys, projects and connections of one tenant share one line and one counter.

Within a tenant: first come, first served. The paper's predicted-length variant is a way to charge, not to
choose: a caller that charges the predicted cost at dispatch and corrects it later has it (the gateway
does); a caller that charges tokens as they come has the plain one.

Guarantee: the bound above, and with it a turn for every tenant. Loses where tokens are a bad measure of cost
(a long context makes each decoded token dearer), and ignores length: inside a tenant a short request waits
behind a long one (see `hybrid.py`).
"""

from __future__ import annotations

from engine.entry import QueueEntry
from engine.scheduling.claims import ALL
from engine.scheduling.order.base import Order
from engine.scheduling.order.by_tenant import ByTenant
from engine.scheduling.order.fcfs import Fcfs
from engine.scheduling.order.lazy_heap import Key


class Vtc(ByTenant):
    """One line a tenant, ranked by `counters`, which are charged elsewhere."""

    name = "vtc"
    claims = ALL

    def rank(self, entry: QueueEntry, now_s: float) -> tuple[float, ...]:
        return (self._counters.value(entry.tenant_id), entry.arrived_s)

    def _standing(self, tenant_id: str) -> Key:
        head = self._lines[tenant_id].peek(0.0)
        assert head is not None, "an empty line was kept"
        return (self._counters.value(tenant_id), head.arrived_s, self._numbers[tenant_id])

    def _new_line(self) -> Order:
        return Fcfs(self._counters)

    def _comes(self, tenant_id: str, *, preempted: bool) -> None:
        if preempted:
            return
        lowest = self._heap.lowest(self._standing)
        lift_to = self._counters.left_last if lowest is None else lowest
        if lift_to is not None:
            self._counters.lift(tenant_id, self._counters.value(lift_to), lift_to)

    def _leaves(self, tenant_id: str) -> None:
        self._counters.left_last = tenant_id
