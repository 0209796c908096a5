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

Inside a tenant the urgency is that of what its client asks for, however late, and where something is promised
only if it is earlier.

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
from engine.scheduling.order.keyed import KeyedByDeadline, Terms
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


class Priority(KeyedByDeadline):
    name = "priority"
    claims = SAFE | {WORK_CONSERVATION, NO_STARVATION}
    interrupts = True

    def __init__(self, counters: ServiceCountersLike) -> None:
        super().__init__(counters)
        self._tenants = TenantHeap(counters)

    @property
    def operations(self) -> int:
        return super().operations + self._tenants.operations

    def add(self, entry: QueueEntry, *, front: bool = False) -> None:
        super().add(entry, front=front)
        self._tenants.put(entry.tenant_id, self._standing)

    def outranks(self, waiting: QueueEntry, running: QueueEntry, now_s: float) -> bool:
        return self._key_of(waiting) + MARGIN_TOKENS < self._key_of(running)

    def clone(self, counters: ServiceCountersLike) -> Self:
        copy = super().clone(counters)
        for tenant_id in copy._entries_of:
            copy._tenants.put(tenant_id, copy._standing)
        return copy

    def _terms(self, entry: QueueEntry) -> Terms:
        """Everything but the length, and by how much the length counts."""
        fixed = (
            TIER_TOKENS * max(0, entry.tier)
            + URGENCY_TOKENS_PER_S * _slack_s(entry, entry.deadline_s)
            + HISTORY_WEIGHT * min(HISTORY_CAP_COST, self._ahead_cost(entry.tenant_id))
            + AGEING * self._counters.served_cost
        )
        return (fixed, min(1.0, len(self) / BUSY_ENTRIES))

    def _key(self, entry: QueueEntry, terms: Terms) -> float:
        fixed, load = terms
        return fixed + load * remaining_tokens(entry)

    def _own_key(self, entry: QueueEntry, key: float) -> float:
        if entry.own_deadline_s is None:
            return key
        gained_s = _slack_s(entry, entry.deadline_s) - max(0.0, entry.own_deadline_s - entry.arrived_s)
        return key - URGENCY_TOKENS_PER_S * (gained_s if entry.deadline_s is None else max(0.0, gained_s))

    def _terms_at(self, entry: QueueEntry, terms: Terms, key: float) -> Terms:
        return (key - terms[1] * remaining_tokens(entry), terms[1])

    def _ahead_cost(self, tenant_id: str) -> float:
        lowest = self._tenants.lowest(self._standing)
        if lowest is None:
            return 0
        return max(0, self._counters.value(tenant_id) - self._counters.value(lowest)) / COUNTER_SCALE

    def _standing(self, tenant_id: str) -> Key:
        return (self._counters.value(tenant_id),)

    def _take(self, entry_id: str) -> QueueEntry:
        entry = super()._take(entry_id)
        if entry.tenant_id not in self._entries_of:
            self._tenants.drop(entry.tenant_id)
        return entry


def _slack_s(entry: QueueEntry, deadline_s: float | None) -> float:
    """Seconds from its arrival to a deadline, at most the horizon; without one, that."""
    if deadline_s is None:
        return HORIZON_S
    return min(HORIZON_S, max(0.0, deadline_s - entry.arrived_s))
