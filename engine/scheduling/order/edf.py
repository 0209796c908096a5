"""Earliest deadline first.

Who has no deadline is due `DEFAULT_S` after its arrival. A deadline counts as no earlier than the arrival and
no later than `HORIZON_S` after it. Inside a tenant what a client asks for counts, however late, and where
something is promised only if it is earlier.

Guarantee (Liu and Layland, 1973; Dertouzos, 1974): if any order on a single server meets all deadlines, this
one does. No entry starves. Loses under overload, where one miss makes the next. Ignores length.
"""

from __future__ import annotations

from engine.entry import QueueEntry
from engine.scheduling.claims import NO_STARVATION, SAFE, WORK_CONSERVATION
from engine.scheduling.order.keyed import KeyedByDeadline, Terms

DEFAULT_S = 30.0
HORIZON_S = 600.0


class Edf(KeyedByDeadline):
    name = "edf"
    claims = SAFE | {WORK_CONSERVATION, NO_STARVATION}

    def _terms(self, entry: QueueEntry) -> Terms:
        if entry.deadline_s is None:
            return (entry.arrived_s + DEFAULT_S,)
        return (min(max(entry.deadline_s, entry.arrived_s), entry.arrived_s + HORIZON_S),)

    def _key(self, entry: QueueEntry, terms: Terms) -> float:
        return terms[0]

    def _own_key(self, entry: QueueEntry, key: float) -> float:
        if entry.own_deadline_s is None:
            return key
        own_s = max(entry.own_deadline_s, entry.arrived_s)
        return own_s if entry.deadline_s is None else min(key, own_s)

    def _terms_at(self, entry: QueueEntry, terms: Terms, key: float) -> Terms:
        return (key,)
