"""Which waiting request goes to an engine next, and what has every tenant had so far?

Pure: time is passed in, decisions are returned. One writer: nobody else touches the queue or the service
counters. Tiers are strict bands; inside a tier the order between tenants is the policy's (`vtc`: weighted
fair by service counter).

Cost of a request = computed input tokens + 2 x output tokens. The predicted cost is charged at dispatch,
output beyond the prediction as it comes, and the difference to what really happened at the end. A tenant
that was idle is lifted when it returns (inside the order), and never gets credit for the idle time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.scheduling.counters import ServiceCounters
from engine.scheduling.order import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, Entry
from engine.scheduling.tiers import TieredQueue
from gateway.flow.log import MAX_BACKLOG_TENANTS, DispatchLog, LogRecord, Waiting
from gateway.flow.window import NUM_RANKS, Load, Replica, WindowRule

MAX_IDLE_TENANTS = 10_000
"""Tenants whose totals are remembered while they have nothing queued or running."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request at the gate. `entry` counts all its sequences together."""

    entry: Entry
    sequences: int
    kv_tokens: int
    """Predicted: what all its sequences together occupy at their end."""
    max_tokens: int = 1_000_000
    """The most that one sequence can emit."""
    is_exact: bool = False
    """Every sequence emits exactly `max_tokens`."""


@dataclass(frozen=True, slots=True)
class QueueFull:
    """Refused at the gate: `limit` requests wait already, of this tenant or altogether."""

    of_tenant: bool
    limit: int
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A turn: send `ticket` to `replica_id`; `counter` is the tenant's, as the engine should know it."""

    ticket: Ticket
    replica_id: str
    counter: int


@dataclass(slots=True)
class InFlight:
    """A dispatched request that has not finished."""

    ticket: Ticket
    replica_id: str
    dispatched_s: float
    charged_cost: int
    output_tokens: int = 0
    live_sequences: int = 0
    kv_tokens: int = 0


@dataclass(slots=True)
class TenantFlow:
    """One tenant's part, for people: what waits, what runs, what it has had."""

    tenant_id: str
    weight: float = 1.0
    queued: list[int] = field(default_factory=lambda: [0] * NUM_RANKS)
    running: int = 0
    dispatched: int = 0
    finished: int = 0
    service_cost: int = 0
    """Cost tokens of finished requests, as really computed and emitted."""
    running_output_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def is_idle(self) -> bool:
        return self.running == 0 and not any(self.queued)


class FlowController:
    """The queue in front of all replicas of a model."""

    def __init__(
        self,
        order_name: str,
        counters: ServiceCounters,
        *,
        max_queued: int,
        max_queued_per_tenant: int,
        queue_ttl_s: Sequence[float],
        window: WindowRule,
        log_records: int,
    ) -> None:
        """`queue_ttl_s` by tier rank. Raises `ValueError` for an unknown order."""
        self.counters = counters
        self.order_name = order_name
        self.window = window
        self.log = DispatchLog(log_records)
        self._queue = TieredQueue(order_name, counters)
        self._max_queued = max_queued
        self._max_queued_per_tenant = max_queued_per_tenant
        self._queue_ttl_s = tuple(queue_ttl_s)
        self._waiting: dict[str, Ticket] = {}
        self._lines: list[dict[str, dict[str, float]]] = [{} for _ in range(NUM_RANKS)]
        self._in_flight: dict[str, InFlight] = {}
        self._loads: dict[str, Load] = {}
        self._tenants: dict[str, TenantFlow] = {}
        self._dispatch_interval_s = 1.0
        self._last_dispatch_s: float | None = None

    def set_order(self, order_name: str) -> None:
        """Another order for what waits and for what comes. Raises `UnknownPolicy`."""
        self._queue.set_order(order_name)
        self.order_name = order_name

    # ------------------------------------------------------------ arrivals and departures

    def enqueue(self, ticket: Ticket, now_s: float) -> QueueFull | None:
        """Puts a request in line. Raises `ValueError` when its id is known already."""
        entry = ticket.entry
        if entry.entry_id in self._waiting or entry.entry_id in self._in_flight:
            raise ValueError(f"request {entry.entry_id} is here already")
        tenant = self._tenant(entry)
        if sum(tenant.queued) >= self._max_queued_per_tenant:
            return QueueFull(True, self._max_queued_per_tenant, self._retry_after_s())
        if len(self._waiting) >= self._max_queued:
            return QueueFull(False, self._max_queued, self._retry_after_s())
        self._queue.add(entry)
        self._waiting[entry.entry_id] = ticket
        self._lines[entry.tier].setdefault(entry.tenant_id, {})[entry.entry_id] = entry.arrived_s
        tenant.queued[entry.tier] += 1
        self._note("arrive", entry, now_s)
        return None

    def cancel(self, entry_id: str, now_s: float) -> bool:
        """Takes a waiting request out of line; False when it does not wait (any more)."""
        ticket = self._waiting.get(entry_id)
        if ticket is None:
            return False
        self._queue.remove(entry_id)
        self._leave_line(ticket.entry)
        self._note("leave", ticket.entry, now_s)
        return True

    def expire(self, now_s: float) -> list[Ticket]:
        """Takes out, and returns, what has waited longer than its tier allows."""
        late = [
            ticket
            for ticket in self._waiting.values()
            if now_s - ticket.entry.arrived_s >= self._queue_ttl_s[ticket.entry.tier]
        ]
        for ticket in late:
            self.cancel(ticket.entry.entry_id, now_s)
        return late

    # ------------------------------------------------------------ turns

    def dispatch(self, now_s: float, replicas: Sequence[Replica]) -> list[Dispatch]:
        """Everything that may go now, in order. The head of the line is never passed over: if it finds
        no room, nobody behind it goes either, whatever their size."""
        turns: list[Dispatch] = []
        while (head := self._queue.peek(now_s)) is not None:
            ticket = self._waiting[head.entry_id]
            replica = self._choose(ticket, replicas)
            if replica is None:
                break
            turns.append(self._dispatch_one(ticket, replica, now_s))
        return turns

    def _choose(self, ticket: Ticket, replicas: Sequence[Replica]) -> Replica | None:
        """The replica with room that is least loaded with work this request would have to share with."""
        rank = ticket.entry.tier
        best: tuple[float, float, str] | None = None
        chosen: Replica | None = None
        for replica in replicas:
            load = self._loads.setdefault(replica.replica_id, Load())
            if not self.window.has_room(replica, load, rank, ticket.sequences, ticket.kv_tokens):
                continue
            share_ahead = load.ahead_of(rank)[0] / replica.max_sequences
            share_all = sum(load.sequences) / replica.max_sequences
            score = (share_ahead, share_all, replica.replica_id)
            if best is None or score < best:
                best, chosen = score, replica
        return chosen

    def _dispatch_one(self, ticket: Ticket, replica: Replica, now_s: float) -> Dispatch:
        entry = ticket.entry
        self._note("dispatch", entry, now_s, replica.replica_id, self._backlog(entry.tier))
        popped = self._queue.pop(now_s)
        assert popped.entry_id == entry.entry_id, "pop must return what peek named"
        self._leave_line(entry)
        self.counters.charge(entry.tenant_id, entry.weight, entry.predicted_cost)
        self._in_flight[entry.entry_id] = InFlight(
            ticket,
            replica.replica_id,
            now_s,
            charged_cost=entry.predicted_cost,
            live_sequences=ticket.sequences,
            kv_tokens=ticket.kv_tokens,
        )
        self._loads[replica.replica_id].add(entry.tier, ticket.sequences, ticket.kv_tokens)
        tenant = self._tenant(entry)
        tenant.running += 1
        tenant.dispatched += 1
        if self._last_dispatch_s is not None:
            gap_s = now_s - self._last_dispatch_s
            self._dispatch_interval_s += 0.1 * (gap_s - self._dispatch_interval_s)
        self._last_dispatch_s = now_s
        return Dispatch(ticket, replica.replica_id, self._queue.counter(entry.tenant_id, entry.tier))

    # ------------------------------------------------------------ what came of them

    def progress(self, entry_id: str, output_tokens: int, live_sequences: int) -> None:
        """`output_tokens` emitted so far, all sequences together; charges what passes the prediction."""
        flight = self._in_flight.get(entry_id)
        if flight is None:
            return
        entry = flight.ticket.entry
        self._tenant(entry).running_output_tokens += output_tokens - flight.output_tokens
        flight.output_tokens = output_tokens
        beyond = max(0, output_tokens - entry.predicted_output_tokens)
        cost_so_far = entry.predicted_cost + beyond * OUTPUT_TOKEN_COST
        if cost_so_far > flight.charged_cost:
            self.counters.charge(entry.tenant_id, entry.weight, cost_so_far - flight.charged_cost)
            flight.charged_cost = cost_so_far
        kv_tokens = flight.ticket.kv_tokens + beyond
        if ended := flight.live_sequences - live_sequences:
            kv_tokens = kv_tokens * live_sequences // flight.ticket.sequences
            flight.live_sequences = live_sequences
        self._loads[flight.replica_id].add(entry.tier, -ended, kv_tokens - flight.kv_tokens)
        flight.kv_tokens = kv_tokens

    def finish(self, entry_id: str, input_tokens: int, output_tokens: int, now_s: float) -> None:
        """The request is over: corrects its charge to what was really computed and emitted."""
        flight = self._in_flight.pop(entry_id, None)
        if flight is None:
            return
        entry = flight.ticket.entry
        cost = input_tokens * INPUT_TOKEN_COST + output_tokens * OUTPUT_TOKEN_COST
        tenant = self._tenant(entry)
        beyond = flight.charged_cost - entry.predicted_cost
        self._note("settle", entry, now_s, flight.replica_id, cost=cost, beyond_cost=beyond)
        if cost != flight.charged_cost:
            self.counters.charge(entry.tenant_id, entry.weight, cost - flight.charged_cost)
        self._loads[flight.replica_id].add(entry.tier, -flight.live_sequences, -flight.kv_tokens)
        tenant.running -= 1
        tenant.finished += 1
        tenant.running_output_tokens -= flight.output_tokens
        tenant.service_cost += cost
        tenant.input_tokens += input_tokens
        tenant.output_tokens += output_tokens
        self._forget_idle()

    # ------------------------------------------------------------ views

    def __len__(self) -> int:
        return len(self._waiting)

    def ticket(self, entry_id: str) -> Ticket | None:
        """The ticket of a request that waits or runs."""
        flight = self._in_flight.get(entry_id)
        return flight.ticket if flight is not None else self._waiting.get(entry_id)

    def tickets(self) -> Iterator[Ticket]:
        """Everything that waits, in no particular order."""
        return iter(self._waiting.values())

    @property
    def num_in_flight(self) -> int:
        """Requests dispatched and not finished."""
        return len(self._in_flight)

    def in_flight(self) -> Iterator[InFlight]:
        """Everything dispatched and not finished, oldest first."""
        return iter(self._in_flight.values())

    def load(self, replica_id: str) -> Load:
        """What one replica holds."""
        return self._loads.get(replica_id) or Load()

    def queued_up_to(self, rank: int) -> int:
        """Requests that wait in tier `rank` and above."""
        return sum(len(line) for lines in self._lines[: rank + 1] for line in lines.values())

    def tenants(self) -> list[TenantFlow]:
        """Every tenant known here."""
        return list(self._tenants.values())

    def queued_by_tier(self) -> list[int]:
        """Waiting requests by tier rank."""
        return [sum(len(line) for line in lines.values()) for lines in self._lines]

    def queue_clone(self, counters: ServiceCounters) -> TieredQueue:
        """A copy of the queue that ranks by `counters`, for replays."""
        return self._queue.clone(counters)

    def check(self) -> None:
        """Audits itself; raises `AssertionError` when its books do not agree."""
        assert len(self._queue) == len(self._waiting), "queue and tickets disagree"
        assert sum(self.queued_by_tier()) == len(self._waiting), "lines and tickets disagree"
        for tenant in self._tenants.values():
            assert min(tenant.queued) >= 0, "a tenant's queue is negative"
            assert tenant.running >= 0, "a tenant's running requests are negative"
        for replica_id, load in self._loads.items():
            flights = [each for each in self._in_flight.values() if each.replica_id == replica_id]
            for rank in range(NUM_RANKS):
                mine = [each for each in flights if each.ticket.entry.tier == rank]
                assert load.sequences[rank] == sum(each.live_sequences for each in mine), "sequences"
                assert load.kv_tokens[rank] == sum(each.kv_tokens for each in mine), "KV tokens"

    # ------------------------------------------------------------ inside

    def _tenant(self, entry: Entry) -> TenantFlow:
        tenant = self._tenants.get(entry.tenant_id)
        if tenant is None:
            tenant = self._tenants[entry.tenant_id] = TenantFlow(entry.tenant_id)
        tenant.weight = entry.weight
        return tenant

    def _forget_idle(self) -> None:
        if len(self._tenants) <= MAX_IDLE_TENANTS:
            return
        for tenant_id in [each.tenant_id for each in self._tenants.values() if each.is_idle]:
            del self._tenants[tenant_id]

    def _leave_line(self, entry: Entry) -> None:
        del self._waiting[entry.entry_id]
        line = self._lines[entry.tier][entry.tenant_id]
        del line[entry.entry_id]
        if not line:
            del self._lines[entry.tier][entry.tenant_id]
        self._tenants[entry.tenant_id].queued[entry.tier] -= 1

    def _retry_after_s(self) -> float:
        """About the time until one place in the queue is free."""
        return min(60.0, max(1.0, self._dispatch_interval_s))

    def _backlog(self, tier: int) -> list[Waiting]:
        lines = self._lines[tier]
        # The band's own view: the shared counter plus what the band lifted the tenant by.
        ranked = [(self._queue.counter(tenant_id, tier), tenant_id) for tenant_id in lines]
        if len(ranked) > MAX_BACKLOG_TENANTS:
            ranked = heapq.nsmallest(MAX_BACKLOG_TENANTS, ranked)
        return [
            Waiting(tenant_id, counter, min(lines[tenant_id].values()), len(lines[tenant_id]))
            for counter, tenant_id in ranked
        ]

    def _note(
        self,
        event: str,
        entry: Entry,
        now_s: float,
        replica_id: str = "",
        backlog: list[Waiting] | None = None,
        cost: int = 0,
        beyond_cost: int = 0,
    ) -> None:
        self.log.append(
            LogRecord(
                event,
                now_s,
                entry.entry_id,
                entry.tenant_id,
                entry.tier,
                entry.arrived_s,
                entry.weight,
                self._queue.counter(entry.tenant_id, entry.tier),
                entry.predicted_cost,
                cost,
                beyond_cost,
                replica_id,
                backlog or [],
            )
        )
