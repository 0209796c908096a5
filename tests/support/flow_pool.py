"""The flow controller in front of an ideal engine.

The real controller; the engine is a few places that each serve `rate` cost tokens a second, the highest rank
first, a displaced request going on later. Time is virtual and nothing is random but what a test makes so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.entry import QueueEntry
from gateway.flow.controller import Dispatch, Ticket
from gateway.flow.window import NUM_RANKS, Replica
from tests.support.builders import flow_controller

REPLICA = "ideal"


@dataclass
class Running:
    """A request at the engine."""

    turn: Dispatch
    number: int
    left_cost: float
    sent_s: float


@dataclass
class Party:
    """A tenant that always has `depth` requests waiting, sized by `size(number)` -> (input, output)."""

    tenant: str
    depth: int
    tier: int = 1
    weight: float = 1.0
    reserved: float = 0.0
    size: Callable[[int], tuple[int, int]] = lambda number: (10, 20)


@dataclass
class FlowPool:
    """One replica of `places`, each serving `rate` cost tokens a second."""

    places: int = 4
    rate: float = 100.0
    policy: str = "vtc"
    kv_tokens: int = 1_000_000
    lookahead: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    parties: list[Party] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.flow = flow_controller(
            self.policy,
            lookahead=self.lookahead,
            max_queued=100_000,
            max_queued_per_tenant=100_000,
            queue_ttl_s=[1e12] * NUM_RANKS,
            **self.options,
        )
        self.replicas = [Replica(REPLICA, self.places, self.kv_tokens)]
        self.now_s = 0.0
        self.running: list[Running] = []
        self.service: dict[str, float] = {}
        """Cost tokens served, by tenant."""
        self.turns: list[tuple[float, Dispatch]] = []
        self.started_s: dict[str, float] = {}
        """Entry id -> when the engine first served it."""
        self.number = 0

    @property
    def capacity(self) -> float:
        """Cost tokens a second."""
        return self.places * self.rate

    def arrive(
        self,
        tenant: str,
        input_tokens: int = 10,
        output_tokens: int = 20,
        *,
        tier: int = 1,
        weight: float = 1.0,
        reserved: float = 0.0,
    ) -> str:
        """A request arrives now; returns its id."""
        self.number += 1
        entry = QueueEntry(
            f"{tenant}-{self.number}", tenant, self.now_s, input_tokens, output_tokens, tier, weight
        )
        ticket = Ticket(entry, 1, input_tokens + output_tokens, reserved_cost_per_s=reserved)
        assert self.flow.enqueue(ticket, self.now_s) is None
        return entry.entry_id

    def run(self, until_s: float, *, while_: Callable[[], bool] = lambda: True) -> None:
        """Lets time pass."""
        while self.now_s < until_s and while_():
            self._refill()
            for turn in self.flow.dispatch(self.now_s, self.replicas):
                self.turns.append((self.now_s, turn))
                self.running.append(
                    Running(turn, len(self.turns), float(turn.ticket.entry.predicted_cost), self.now_s)
                )
            active = sorted(self.running, key=lambda each: (each.turn.tier, each.number))[: self.places]
            for each in active:
                self.started_s.setdefault(each.turn.ticket.entry.entry_id, self.now_s)
            # Something may also become due while nothing ends: look again after a while.
            seconds = min([each.left_cost / self.rate for each in active] + [until_s - self.now_s, 0.25])
            self.now_s += seconds
            for each in active:
                served = min(each.left_cost, seconds * self.rate)
                each.left_cost -= served
                tenant = each.turn.ticket.entry.tenant_id
                self.service[tenant] = self.service.get(tenant, 0.0) + served
            for each in [each for each in self.running if each.left_cost <= 1e-9]:
                self.running.remove(each)
                entry = each.turn.ticket.entry
                self.flow.progress(entry.entry_id, entry.predicted_output_tokens, 0)
                self.flow.finish(
                    entry.entry_id, entry.input_tokens, entry.predicted_output_tokens, self.now_s
                )

    def served(self, tenant: str) -> float:
        """Cost tokens so far."""
        return self.service.get(tenant, 0.0)

    def waits(self, tenant: str) -> int:
        """Requests of a tenant in the queue."""
        return sum(flow.num_queued for flow in self.flow.tenants.all() if flow.tenant_id == tenant)

    def _refill(self) -> None:
        for party in self.parties:
            for _ in range(party.depth - self.waits(party.tenant)):
                self.arrive(
                    party.tenant, *party.size(self.number), tier=party.tier, weight=party.weight,
                    reserved=party.reserved,
                )  # fmt: skip
