"""Dispatched requests: their charges, their tenants' lag, and which of them one more would displace.

The predicted cost is charged at the dispatch, output beyond the prediction as it comes, and the difference to
the real cost at the end. Cost = computed input tokens + 2 x output tokens.

**Lag.** A tenant without a waiting request whose requests still run is not idle: it asks for less than its
share. So when it returns to the queue it may stand below the waiting tenants, by as much less as it had
meanwhile, but at most by the cost of the KV tokens in flight on all replicas (VTC's U; lag as in Stoica et
al., "A proportional share resource allocation algorithm", RTSS 1996). Two waiting tenants then differ over
any time by at most U and two requests. Its requests go first until it has caught up: a tenant below its share
hardly waits behind one that floods.

Requests that come at random leave a tenant with nothing in flight for moments, the more often the fewer
places there are. So it counts as idle, and is owed nothing, only when all tenants together have had service
of U since its last request ended: as much as it takes to serve all that is in flight.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST
from engine.scheduling.counters import MAX_TENANTS, ServiceCounters, scaled
from engine.scheduling.order.recent import Recent
from gateway.flow.mclock import MclockReservations
from gateway.flow.placement import Placement
from gateway.flow.types import Displaced, InFlight
from gateway.flow.window import Replica


class InFlightRequests:
    """Everything dispatched and not finished. One writer: the flow controller."""

    def __init__(
        self, counters: ServiceCounters, placement: Placement, reservations: MclockReservations
    ) -> None:
        self._counters = counters
        self._placement = placement
        self._reservations = reservations
        self._by_id: dict[str, InFlight] = {}
        self._of_tenant: dict[str, int] = {}
        """In-flight requests by tenant; tenants with none are absent."""
        self._ended: Recent[int] = Recent(MAX_TENANTS)
        """Service of all tenants when a tenant's last request ended."""

    def begin(self, flight: InFlight, replica: Replica, now_s: float) -> None:
        """A request goes; its predicted cost is charged."""
        entry = flight.ticket.entry
        self._by_id[entry.entry_id] = flight
        self._of_tenant[entry.tenant_id] = self._of_tenant.get(entry.tenant_id, 0) + 1
        self._counters.charge(entry.tenant_id, entry.weight, flight.charged_cost)
        if flight.by_reservation:
            self._reservations.granted(entry.tenant_id, flight.charged_cost, now_s)
        self._placement.add(
            flight.replica_id, flight.tier, flight.is_long, flight.live_sequences, flight.kv_tokens
        )
        self._placement.scorer.dispatched(flight, replica, now_s)

    def progress(self, entry_id: str, output_tokens: int, live_sequences: int) -> int:
        """`output_tokens` emitted so far, all sequences together; charges what passes the prediction.
        Returns how many are new."""
        flight = self._by_id.get(entry_id)
        if flight is None:
            return 0
        entry = flight.ticket.entry
        emitted = output_tokens - flight.output_tokens
        if flight.output_tokens == 0 < output_tokens:
            self._placement.scorer.first_token(entry_id)
        flight.output_tokens = output_tokens
        beyond = max(0, output_tokens - entry.predicted_output_tokens)
        cost_so_far = entry.predicted_cost + beyond * OUTPUT_TOKEN_COST
        if cost_so_far > flight.charged_cost:
            self._charge(flight, cost_so_far - flight.charged_cost)
            flight.charged_cost = cost_so_far
        kv_tokens = flight.ticket.kv_tokens + beyond
        if ended := flight.live_sequences - live_sequences:
            kv_tokens = kv_tokens * live_sequences // flight.ticket.sequences
            flight.live_sequences = live_sequences
        self._placement.add(
            flight.replica_id, flight.tier, flight.is_long, -ended, kv_tokens - flight.kv_tokens
        )
        flight.kv_tokens = kv_tokens
        return emitted

    def finish(self, flight: InFlight, input_tokens: int, output_tokens: int, now_s: float) -> int:
        """A request is over: corrects its charge to what was really computed and emitted, and returns it."""
        entry = flight.ticket.entry
        del self._by_id[entry.entry_id]
        cost = input_tokens * INPUT_TOKEN_COST + output_tokens * OUTPUT_TOKEN_COST
        if cost != flight.charged_cost:
            self._charge(flight, cost - flight.charged_cost)
        self._of_tenant[entry.tenant_id] -= 1
        if not self._of_tenant[entry.tenant_id]:
            del self._of_tenant[entry.tenant_id]
            self._ended.note(entry.tenant_id, self._counters.served_cost)
        if flight.by_reservation:
            self._reservations.ended(entry.tenant_id, now_s)
        self._placement.add(
            flight.replica_id, flight.tier, flight.is_long, -flight.live_sequences, -flight.kv_tokens
        )
        self._placement.scorer.ended(entry.entry_id)
        return cost

    def displaced_by(
        self, rank: int, sequences: int, kv_tokens: int, replica: Replica
    ) -> tuple[Displaced, ...]:
        """The requests that one of `rank` displaces at the engine: of the lower tiers, the lowest first
        and of those who came last, until it fits. Empty where there is room for all."""
        load = self._placement.load(replica.replica_id)
        places = min(sum(load.sequences), replica.max_sequences) + sequences - replica.max_sequences
        kv_over = sum(load.kv_tokens) + kv_tokens - replica.kv_tokens * self._placement.window.kv_window
        if places <= 0 and kv_over <= 0:
            return ()
        lower = [
            flight
            for flight in self._by_id.values()
            if flight.replica_id == replica.replica_id and flight.tier > rank and flight.live_sequences
        ]
        lower.sort(key=lambda flight: (flight.tier, flight.dispatched_s))
        displaced: list[Displaced] = []
        while lower and (places > 0 or kv_over > 0):
            flight = lower.pop()
            places -= flight.live_sequences
            kv_over -= flight.kv_tokens
            entry = flight.ticket.entry
            displaced.append(Displaced(entry.entry_id, entry.tenant_id, flight.tier, flight.kv_tokens))
        return tuple(displaced)

    def lag(self, tenant_id: str, weight: float) -> int:
        """How far below the others a returning tenant of `weight` may stand, on the
        counters' scale. O(replicas)."""
        most = self._placement.kv_tokens * OUTPUT_TOKEN_COST
        if tenant_id not in self._of_tenant:
            ended = self._ended.get(tenant_id)
            if ended is None or self._counters.served_cost - ended >= most:
                return 0
        return scaled(most, weight)

    def get(self, entry_id: str) -> InFlight | None:
        """An in-flight request."""
        return self._by_id.get(entry_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[InFlight]:
        """Oldest first."""
        return iter(self._by_id.values())

    def __contains__(self, entry_id: str) -> bool:
        return entry_id in self._by_id

    def _charge(self, flight: InFlight, cost: int) -> None:
        entry = flight.ticket.entry
        self._counters.charge(entry.tenant_id, entry.weight, cost)
        if flight.by_reservation:
            self._reservations.corrected(entry.tenant_id, cost)
