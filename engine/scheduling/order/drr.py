"""Deficit round robin: every tenant spends a quantum of service a round, in turns.

Shreedhar and Varghese, SIGCOMM 1995, in the form of DLPM (arXiv 2501.14312): a tenant with credit may be
served, what it is served is taken off, and when no waiting tenant has credit, a new round gives every tenant
in debt a quantum. A round keeps to one tenant as long as its credit lasts, which keeps its prefixes in the
cache: a large quantum trades fairness for locality.

Credit needs no feed of its own. With the tenant's counter v, a boundary g and the round r in which g was set,
its credit in round R is g + (R - r) x quantum - v, for one in debt at each round's end, as every waiting
tenant is. So the round in which it may be served follows from v alone: r if v < g, else
r + floor((v - g) / quantum) + 1; and a heap by that round replaces the visits. Counters are per weight, so a
heavier tenant gets more tokens out of a quantum.

An unknown tenant starts with one quantum. One that waited before keeps debt and what credit it had; for
each round that it missed it gets a quantum as long as it is in debt. So idling earns at most a quantum.

Guarantee: backlogged tenants of unit weight differ by at most 2U + quantum (U as in `vtc.py`), which is more
than the fairness bound, so that is not claimed; no tenant starves, since a round ends when all have spent
their quantum. Loses against vtc on fairness (bursts of a quantum), and when the quantum is small on locality.
"""

from __future__ import annotations

from typing import Self

from engine.entry import COUNTER_SCALE, QueueEntry
from engine.scheduling.claims import NO_STARVATION, SAFE, WORK_CONSERVATION
from engine.scheduling.counters import MAX_TENANTS
from engine.scheduling.order.base import Order, ServiceCountersLike
from engine.scheduling.order.by_tenant import ByTenant
from engine.scheduling.order.fcfs import Fcfs
from engine.scheduling.order.lazy_heap import Key
from engine.scheduling.order.recent import Recent

QUANTUM_COST = 2048
"""Cost tokens a round, for a tenant of weight 1."""

_Account = tuple[int, int]
"""(boundary, round in which it was set)."""


class Drr(ByTenant):
    name = "drr"
    claims = SAFE | {WORK_CONSERVATION, NO_STARVATION}
    counts_turns = True
    quantum_cost = QUANTUM_COST

    def __init__(self, counters: ServiceCountersLike) -> None:
        super().__init__(counters)
        self._quantum = self.quantum_cost * COUNTER_SCALE
        self._round = 0
        self._accounts: dict[str, _Account] = {}
        self._left: Recent[_Account] = Recent(MAX_TENANTS)

    def rank(self, entry: QueueEntry, now_s: float) -> tuple[float, ...]:
        """The round in which its tenant may be served, then when it arrived."""
        if entry.tenant_id not in self._accounts:
            return (self._round, entry.arrived_s)
        return (max(self._round, self._round_of(entry.tenant_id)), entry.arrived_s)

    def credit_cost(self, tenant_id: str) -> float:
        """What a waiting tenant may still be served in this round, in cost tokens of weight 1."""
        boundary, since = self._accounts[tenant_id]
        credit = boundary + (self._round - since) * self._quantum - self._counters.value(tenant_id)
        return credit / COUNTER_SCALE

    def _standing(self, tenant_id: str) -> Key:
        return (max(self._round, self._round_of(tenant_id)), self._numbers[tenant_id])

    def _round_of(self, tenant_id: str) -> int:
        return self._round_at(self._accounts[tenant_id], self._counters.value(tenant_id))

    def _round_at(self, account: _Account, value: int) -> int:
        boundary, since = account
        beyond = value - boundary
        return since if beyond < 0 else since + beyond // self._quantum + 1

    def _new_line(self) -> Order:
        return Fcfs(self._counters)

    def _comes(self, tenant_id: str, *, preempted: bool) -> None:
        value = self._counters.value(tenant_id)
        account = self._left.get(tenant_id)
        if account is None:
            account = (value + self._quantum, self._round)
        elif (since := self._round_at(account, value)) <= self._round:
            # Out of debt since that round, and given nothing after it.
            boundary, set_in = account
            account = (boundary + (since - set_in) * self._quantum, self._round)
        self._accounts[tenant_id] = account
        self._left.forget(tenant_id)

    def _leaves(self, tenant_id: str) -> None:
        # As of now: it was given every quantum while it waited; from here on only if it is in debt.
        boundary, set_in = self._accounts.pop(tenant_id)
        self._left.note(tenant_id, (boundary + (self._round - set_in) * self._quantum, self._round))

    def _picked(self, tenant_id: str) -> None:
        # No waiting tenant stands lower, so all have spent their quanta of the rounds before this one.
        self._round = max(self._round, self._round_of(tenant_id))

    def _empty(self, counters: ServiceCountersLike) -> Self:
        copy = type(self)(counters)
        copy._round = self._round
        copy._accounts = self._accounts.copy()
        copy._left = self._left.copy()
        return copy
