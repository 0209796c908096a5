"""Flow controller: the fair queue in front of a model's replicas.

Pure: time is passed in, decisions are returned. One writer of the queue and the service counters. The order
of dispatch is in `dispatch_rules.py`; here is the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec.structs import replace as replace_fields

from engine.entry import QueueEntry, cost_of
from engine.messages import TenantShare
from engine.scheduling.brakes import Brakes
from engine.scheduling.counters import ServiceCounters, scaled
from engine.scheduling.tiers import TieredQueue
from gateway.flow.dispatch_log import DispatchLog, LogRecord, Waiting
from gateway.flow.dispatch_rules import RESERVED_RANK, DispatchRules
from gateway.flow.in_flight import InFlightRequests, Serials
from gateway.flow.knobs import Knob, QueueKnobs, QueueSettings
from gateway.flow.lanes import LONG, ORDINARY
from gateway.flow.learned.switch import ArrivalTrend
from gateway.flow.mclock import MclockReservations
from gateway.flow.placement import Placement, Scorer
from gateway.flow.queue import RequestQueue
from gateway.flow.tenant_stats import TenantFlow, TenantFlows, TenantLine, tokens_ahead
from gateway.flow.types import (
    NOTHING_AHEAD,
    RESUMES,
    Deadlines,
    Dispatch,
    Displaced,
    InFlight,
    QueueFull,
    Reason,
    Ticket,
    TokensAhead,
)
from gateway.flow.window import Replica

__all__ = [
    "Dispatch",
    "Displaced",
    "FlowController",
    "InFlight",
    "QueueFull",
    "TenantFlow",
    "Ticket",
]


class FlowController:
    """The queue in front of all replicas of a model."""

    def __init__(
        self,
        order_name: str,
        counters: ServiceCounters,
        settings: QueueSettings,
        scorer: Scorer | None = None,
    ) -> None:
        """`scorer`: least loaded by default. Raises `ValueError`."""
        self.counters = counters
        self.order_name = order_name
        self.settings = settings
        self.log = DispatchLog(settings.log_records)
        self.arrivals = ArrivalTrend()
        self.knobs = settings.rests
        """Changed by `turn` and `set_brakes` alone."""
        self.queue = RequestQueue(order_name, counters, settings, lag=self._lag)
        self.placement = Placement(settings, scorer or Scorer())
        self._reservations = MclockReservations(settings.reservation_burst_s)
        self.in_flight = InFlightRequests(counters, self.placement, self._reservations)
        self.tenants = TenantFlows()
        self._rules = DispatchRules(self.queue, self.placement, self._reservations, self.tenants)
        self.serials = Serials()
        self._dispatch_interval_s = 1.0
        self._last_dispatch_s: float | None = None

    def turn(self, knob: Knob, value: float) -> None:
        """Turns one of `QUEUE_KNOBS`. Raises `ValueError` for a share outside (0, 1]."""
        self._turn(self.knobs.turned(knob, value))

    def set_brakes(self, brakes: Brakes, now_s: float) -> None:
        """Replaces all brakes. A braked tier does not age, and what has moved up from it goes back."""
        self._turn(replace(self.knobs, brakes=brakes))
        self.queue.take_back(brakes.shares.keys(), now_s)

    def set_order(self, order_name: str) -> None:
        """Applies to waiting requests, too. Raises `UnknownPolicy`."""
        self.queue.tiers.set_order(order_name)
        self.order_name = order_name

    # ------------------------------------------------------------ arrivals and departures

    def enqueue(self, ticket: Ticket, now_s: float) -> QueueFull | None:
        """Raises `ValueError` for a known id."""
        entry = ticket.entry
        if entry.entry_id in self.queue or entry.entry_id in self.in_flight:
            raise ValueError(f"request {entry.entry_id} is here already")
        self.arrivals.arrived(now_s)
        self.tenants.of(entry)  # known from now on, also where it is refused
        full = self.full(entry.tenant_id)
        if full is None:
            self._line_up(ticket, now_s)
        return full

    def full(self, tenant_id: str) -> QueueFull | None:
        """Why another request of the tenant would be refused now; None: there is room."""
        settings = self.settings
        if self.tenants.num_queued(tenant_id) >= settings.max_queued_per_tenant:
            return QueueFull(True, settings.max_queued_per_tenant, self._retry_after_s())
        if len(self.queue) >= settings.max_queued:
            return QueueFull(False, settings.max_queued, self._retry_after_s())
        return None

    def put_back(
        self,
        entry_id: str,
        input_tokens: int,
        output_tokens: int,
        now_s: float,
        expires_s: float | None = None,
    ) -> Ticket | None:
        """A running request has to go on elsewhere: it is charged what it had (all in all), and the rest
        waits at the head of its tenant's line, whatever is full. `expires_s`: as `Ticket.expires_s`. None if
        it does not run."""
        flight = self.in_flight.get(entry_id)
        if flight is None:
            return None
        ticket, entry = flight.ticket, flight.ticket.entry
        had = input_tokens - ticket.had[0], output_tokens - ticket.had[1]
        self.finish(entry_id, input_tokens, output_tokens, now_s)
        rest = replace_fields(
            entry,
            arrived_s=now_s,
            input_tokens=max(0, entry.input_tokens - had[0]),
            predicted_output_tokens=max(1, flight.predicted_output_tokens - had[1]),
            predicted_high_tokens=max(0, entry.predicted_high_tokens - had[1]),
        )
        ticket = replace_fields(
            ticket,
            entry=rest,
            sequences=max(1, flight.live_sequences),
            kv_tokens=flight.kv_tokens,
            needs=ticket.needs | {RESUMES} if output_tokens else ticket.needs,
            before=(input_tokens, output_tokens),
            expires_s=expires_s,
        )
        self._line_up(ticket, now_s, front=True)
        return ticket

    def cancel(self, entry_id: str, now_s: float) -> bool:
        """False if it does not wait."""
        ticket = self.queue.ticket(entry_id)
        if ticket is None:
            return False
        self._note("leave", ticket.entry, now_s, self._counter(ticket.entry))
        self._leave(ticket)
        return True

    def move(
        self, entry_id: str, tier: int, now_s: float, deadlines_s: Deadlines | None = None
    ) -> Ticket | None:
        """Changes a waiting request's tier and deadlines, not its arrival; None if it does not wait."""
        before = self.queue.ticket(entry_id)
        if before is None:
            return None
        self._note("leave", before.entry, now_s, self._counter(before.entry))
        ticket = self.queue.move(entry_id, tier, now_s, deadlines_s)
        assert ticket is not None, "it waited a moment ago"
        queued = self.tenants.of(ticket.entry).queued
        queued[before.entry.tier] -= 1
        queued[tier] += 1
        self._reservations.moves(ticket.entry.tenant_id, before.entry.tier, tier, now_s)
        self._note("arrive", ticket.entry, now_s, self._counter(ticket.entry))
        return ticket

    def expire(self, now_s: float) -> list[Ticket]:
        """Removes and returns what has waited longer than it, or its tier, may."""
        late = self.queue.expired(now_s)
        for ticket in late:
            self.cancel(ticket.entry.entry_id, now_s)
        return late

    def drain(self, now_s: float) -> list[Ticket]:
        """Removes and returns all that waits, oldest first; running requests go on."""
        waiting = sorted(self.queue.tickets(), key=lambda ticket: ticket.entry.arrived_s)
        for ticket in waiting:
            self.cancel(ticket.entry.entry_id, now_s)
        return waiting

    # ------------------------------------------------------------ turns

    def dispatch(self, now_s: float, replicas: Sequence[Replica]) -> list[Dispatch]:
        self.queue.age(now_s)
        if not replicas or not len(self.queue):
            return []
        return self._rules.turns(now_s, replicas, self.grant)

    def grant(self, ticket: Ticket, replica: Replica, rank: int, now_s: float, reason: Reason) -> Dispatch:
        entry = ticket.entry
        band, lane = self.queue.place(entry.entry_id)
        if reason is Reason.ORDER:
            self.queue.had_turn_by_order(entry.entry_id)
        rule = reason.value or ("aged" if band < entry.tier else "")
        self._note(
            "dispatch",
            entry,
            now_s,
            self._counter(entry),
            replica.replica_id,
            self.queue.beside(entry.entry_id),
            rule=rule,
        )
        self._leave(ticket)
        by_reservation = reason is Reason.RESERVATION
        displaced = self.in_flight.displaced_by(rank, ticket.sequences, ticket.kv_tokens, replica)
        flight = InFlight(
            ticket,
            replica.replica_id,
            now_s,
            charged_cost=entry.predicted_cost,
            live_sequences=ticket.sequences,
            kv_tokens=ticket.kv_tokens,
            tier=rank,
            is_long=lane == LONG,
            by_reservation=by_reservation,
        )
        self.in_flight.begin(flight, replica, now_s)
        self.queue.tiers.had_turn(entry.tenant_id, band, lane)
        self.tenants.dispatched(entry)
        if self._last_dispatch_s is not None:
            gap_s = now_s - self._last_dispatch_s
            self._dispatch_interval_s += 0.1 * (gap_s - self._dispatch_interval_s)
        self._last_dispatch_s = now_s
        counter = self.queue.tiers.counter(entry.tenant_id, band, lane)
        had = counter - self.in_flight.ahead.of(entry.tenant_id)
        if by_reservation:
            # At the engine it must not stand behind requests that wait here: those would be sent for ever.
            counter = int(min(counter, self.queue.lowest_counter(RESERVED_RANK, now_s)))
            had = min(had, counter)
        return Dispatch(
            ticket,
            replica.replica_id,
            counter,
            rank,
            by_reservation,
            displaced,
            reason is Reason.OWED,
            had,
            self.serials.of(replica.replica_id, replica.life, entry.tenant_id, rank),
            replica.life,
        )

    # ------------------------------------------------------------ progress and end

    def progress(self, entry_id: str, output_tokens: int, live_sequences: int) -> None:
        """`output_tokens` so far, all sequences together; charges what exceeds the prediction."""
        flight = self.in_flight.get(entry_id)
        if flight is not None:
            output_tokens -= flight.ticket.had[1]
            is_first = flight.output_tokens == 0 < output_tokens
            emitted = self.in_flight.progress(entry_id, output_tokens, live_sequences)
            self.tenants.emitted(flight.ticket.entry, emitted, is_first=is_first)

    def foresee(self, entry_id: str, foreseen_tokens: tuple[int, int], now_s: float) -> None:
        """The engine's forecast of the whole output (p50, p90): corrects charge and holdings."""
        flight = self.in_flight.get(entry_id)
        if flight is None:
            return
        announced, entry, before = flight.announced_cost, flight.ticket.entry, flight.ticket.had[1]
        foreseen_tokens = foreseen_tokens[0] - before, foreseen_tokens[1] - before
        counter = self._running_counter(flight)
        self.in_flight.foresee(flight, foreseen_tokens)
        if flight.charged_cost != announced:
            self._note("correct", entry, now_s, counter, flight.replica_id, cost=flight.charged_cost)

    def heard(self, replica_id: str, life: str, service: Mapping[str, TenantShare]) -> None:
        """The service of a step at an engine in its `life`, by tenant, before what it emitted is passed to
        `progress`. A lift is the engine's for a tenant that asks for less than its share."""
        for tenant_id, share in service.items():
            cost = cost_of(share.computed_tokens, share.emitted_tokens)
            self.in_flight.serve(tenant_id, scaled(cost, self.tenants.weight(tenant_id)))
            self.serials.note(replica_id, life, tenant_id, share.serials)
            for tier, amount in share.lifts.items():
                self.queue.raise_by(tenant_id, tier, amount)

    def finish(self, entry_id: str, input_tokens: int, output_tokens: int, now_s: float) -> None:
        """Corrects the charge to what was really computed and emitted, all in all. One that was put back, and
        ended where it was before its turn came, is charged what it had meanwhile."""
        ticket, flight = self.ticket(entry_id), self.in_flight.get(entry_id)
        if ticket is None or (flight is None and ticket.before is None):
            return
        entry = ticket.entry
        input_tokens -= ticket.had[0]
        output_tokens -= ticket.had[1]
        if flight is None:
            cost, counter = cost_of(input_tokens, output_tokens), self._counter(entry)
            self.cancel(entry_id, now_s)
            self.counters.charge(entry.tenant_id, entry.weight, cost)
            self._note("settle", entry, now_s, counter, cost=cost)
            return
        counter, beyond = self._running_counter(flight), flight.beyond_cost
        cost = self.in_flight.finish(flight, input_tokens, output_tokens, now_s)
        self._note("settle", entry, now_s, counter, flight.replica_id, cost=cost, beyond_cost=beyond)
        self.tenants.finished(flight, input_tokens, output_tokens, cost)

    # ------------------------------------------------------------ views

    def __len__(self) -> int:
        return len(self.queue)

    def ticket(self, entry_id: str) -> Ticket | None:
        flight = self.in_flight.get(entry_id)
        return flight.ticket if flight is not None else self.queue.ticket(entry_id)

    def queued_up_to(self, rank: int) -> int:
        return self.queue.queued_up_to(rank)

    @property
    def wants_more(self) -> bool:
        """Whether requests wait that no brake holds back."""
        braked = self.knobs.brakes.shares
        if not braked:
            return len(self.queue) > 0
        return any(count for rank, count in enumerate(self.queue.queued_by_tier()) if rank not in braked)

    def tokens_ahead(self, entry_id: str, now_s: float) -> TokensAhead:
        """What is ahead of a request; nothing if it does not wait. O(waiting tenants + running requests)."""
        ticket = self.queue.ticket(entry_id)
        if ticket is None:
            return NOTHING_AHEAD
        entry, (band, lane) = ticket.entry, self.queue.place(entry_id)
        lines = self._lines_ahead(entry_id, now_s)
        turn = None
        if self.queue.tiers.is_by_tenant:
            own = sum(line.cost for line in lines if line.tenant_id == entry.tenant_id and line.band == band)
            turn = self.queue.tiers.counter(entry.tenant_id, band, lane) + scaled(own, entry.weight)
        return tokens_ahead(entry.tenant_id, band, turn, lines, self.in_flight)

    def queue_clone(self, counters: ServiceCounters) -> TieredQueue:
        """A copy of the queue that ranks by `counters`, for replays. It can be pickled."""
        return self.queue.tiers.clone(counters, self.in_flight.lags(self.tenants.weight))

    def check(self, now_s: float | None = None) -> None:
        """Audits itself; raises `AssertionError` when its state is inconsistent. With `now_s`, right after a
        `dispatch` at that instant, also that every due request has moved up."""
        self.queue.check(now_s)
        self.placement.check(list(self.in_flight))
        queued = {tenant.tenant_id: tenant.queued for tenant in self.tenants.all()}
        running: dict[str, int] = {}
        for flight in self.in_flight:
            if flight.by_reservation:
                tenant_id = flight.ticket.entry.tenant_id
                running[tenant_id] = running.get(tenant_id, 0) + 1
        self._reservations.check(queued, running)
        assert sum(map(sum, queued.values())) == len(self.queue), "tenants and tickets disagree"
        for tenant in self.tenants.all():
            assert min(tenant.queued) >= 0, "a tenant's queue is negative"
            assert min(tenant.running) >= 0, "a tenant's running requests are negative"

    # ------------------------------------------------------------ inside

    def _turn(self, knobs: QueueKnobs) -> None:
        settings, placement = knobs.applied(self.settings), self.placement
        self.knobs = knobs
        placement.window, placement.lanes, placement.brakes = settings.window, settings.lanes, knobs.brakes
        placement.scorer.prefix_weight = knobs.prefix_weight
        self.queue.set_ageing(settings.ageing_s)

    def _lines_ahead(self, entry_id: str, now_s: float) -> list[TenantLine]:
        return self.queue.lines_ahead(entry_id, now_s)

    def _line_up(self, ticket: Ticket, now_s: float, *, front: bool = False) -> None:
        entry = ticket.entry
        tenant = self.tenants.of(entry)
        self._reservations.arrives(ticket, now_s, already_waiting=tenant.queued)
        self.queue.add(ticket, now_s, front=front)
        tenant.queued[entry.tier] += 1
        self._note("arrive", entry, now_s, self._counter(entry))

    def _leave(self, ticket: Ticket) -> None:
        entry = ticket.entry
        self.queue.remove(entry.entry_id)
        self.tenants.of(entry).queued[entry.tier] -= 1
        self._reservations.leaves(entry)

    def _lag(self, tenant_id: str, other_id: str) -> int:
        lag = self.in_flight.lag(tenant_id, self.tenants.weight(tenant_id))
        return max(lag, self.in_flight.below(other_id))

    def _retry_after_s(self) -> float:
        return min(60.0, max(1.0, self._dispatch_interval_s))

    def _counter(self, entry: QueueEntry) -> int:
        """The number by which a waiting request's tenant is ranked where it waits."""
        return self.queue.tiers.counter(entry.tenant_id, *self.queue.place(entry.entry_id))

    def _running_counter(self, flight: InFlight) -> int:
        entry = flight.ticket.entry
        return self.queue.tiers.counter(entry.tenant_id, entry.tier, LONG if flight.is_long else ORDINARY)

    def _note(
        self,
        event: str,
        entry: QueueEntry,
        now_s: float,
        counter: int,
        replica_id: str = "",
        backlog: list[Waiting] | None = None,
        cost: int = 0,
        beyond_cost: int = 0,
        rule: str = "",
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
                counter,
                entry.predicted_cost,
                cost,
                beyond_cost,
                replica_id,
                backlog or [],
                rule,
            )
        )
