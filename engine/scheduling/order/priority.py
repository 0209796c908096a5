"""A priority score: tier, urgency, predicted length, history and load in one sum, with ageing.

Score in tokens, the smaller the earlier:

    TIER_TOKENS x tier
  + URGENCY_TOKENS_PER_S x seconds from arrival to deadline (at most HORIZON_S; without a deadline, that)
  + HISTORY_WEIGHT x service per weight that its tenant has had beyond the least served one that waits
    (at most HISTORY_CAP_COST)
  + load x predicted remaining tokens; load = waiting entries / BUSY_ENTRIES, at most 1
  + AGEING x cost tokens served until it joined

An idle engine goes by arrival, tier and urgency; the longer the queue, the more a short length counts, as
a long one would hold up more others. History and load are those of the moment at which the
entry joined, so a score is fixed while it waits and a heap suffices. Weighted sums of this kind: llm-d's flow
control (0.8 attained service + 0.2 wait), QLM, Andes; the weights here are ours.

An entry interrupts a running one whose score is larger by more than `MARGIN_TOKENS`.

Guarantee: every term but age is at least 0 and none grows with waiting, so an entry that joins after others
got score / AGEING cost tokens cannot pass: no entry starves. No fairness bound (history is one term of
five), and no optimality: it loses to each specialised order on that one's own measure.
"""

from __future__ import annotations

from typing import Self

from engine.entry import COUNTER_SCALE, QueueEntry
from engine.scheduling.claims import NO_STARVATION, SAFE, WORK_CONSERVATION
from engine.scheduling.order.base import ServiceCountersLike
from engine.scheduling.order.keyed import Keyed, Terms
from engine.scheduling.order.lazy_heap import Key, TenantHeap
from engine.scheduling.order.sizes import remaining_tokens

TIER_TOKENS = 4096
URGENCY_TOKENS_PER_S = 32
HORIZON_S = 60.0
HISTORY_WEIGHT = 0.25
HISTORY_CAP_COST = 4096
BUSY_ENTRIES = 64
AGEING = 1 / 16
MARGIN_TOKENS = 256


class Priority(Keyed):
    """One heap by score."""

    name = "priority"
    claims = SAFE | {WORK_CONSERVATION, NO_STARVATION}
    interrupts = True

    def __init__(self, counters: ServiceCountersLike) -> None:
        super().__init__(counters)
        self._tenants = TenantHeap(counters)
        self._waiting_of: dict[str, int] = {}
        """Waiting entries by tenant."""

    @property
    def operations(self) -> int:
        """Heap levels passed so far."""
        return self._heap.operations + self._tenants.operations

    def add(self, entry: QueueEntry, *, front: bool = False) -> None:
        """Joins by its score. Raises ValueError for an entry that waits already."""
        super().add(entry, front=front)
        self._waiting_of[entry.tenant_id] = self._waiting_of.get(entry.tenant_id, 0) + 1
        self._tenants.put(entry.tenant_id, self._standing)

    def outranks(self, waiting: QueueEntry, running: QueueEntry, now_s: float) -> bool:
        """Whether its score is smaller by more than the margin."""
        return self._key_of(waiting) + MARGIN_TOKENS < self._key_of(running)

    def clone(self, counters: ServiceCountersLike) -> Self:
        """An independent copy over `counters`."""
        copy = super().clone(counters)
        copy._waiting_of = self._waiting_of.copy()
        for tenant_id in copy._waiting_of:
            copy._tenants.put(tenant_id, copy._standing)
        return copy

    def _terms(self, entry: QueueEntry) -> Terms:
        """Everything but the length, and by how much the length counts."""
        slack_s = HORIZON_S
        if entry.deadline_s is not None:
            slack_s = min(HORIZON_S, max(0.0, entry.deadline_s - entry.arrived_s))
        fixed = (
            TIER_TOKENS * max(0, entry.tier)
            + URGENCY_TOKENS_PER_S * slack_s
            + HISTORY_WEIGHT * min(HISTORY_CAP_COST, self._ahead_cost(entry.tenant_id))
            + AGEING * self._counters.served_cost
        )
        return (fixed, min(1.0, len(self) / BUSY_ENTRIES))

    def _key(self, entry: QueueEntry, terms: Terms) -> float:
        fixed, load = terms
        return fixed + load * remaining_tokens(entry)

    def _ahead_cost(self, tenant_id: str) -> float:
        """Cost tokens per weight that the tenant has had beyond the least served one that waits."""
        lowest = self._tenants.lowest(self._standing)
        if lowest is None:
            return 0
        return max(0, self._counters.value(tenant_id) - self._counters.value(lowest)) / COUNTER_SCALE

    def _standing(self, tenant_id: str) -> Key:
        return (self._counters.value(tenant_id),)

    def _take(self, entry_id: str) -> QueueEntry:
        entry = super()._take(entry_id)
        left = self._waiting_of[entry.tenant_id] - 1
        if left:
            self._waiting_of[entry.tenant_id] = left
        else:
            del self._waiting_of[entry.tenant_id]
            self._tenants.drop(entry.tenant_id)
        return entry
