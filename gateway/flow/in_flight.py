"""Dispatched requests: their charges, their tenants' lag, and which of them one more would displace.

The predicted cost is charged at the dispatch, corrected whenever the engine foresees another length, output
beyond the prediction is charged as it comes, and the difference to the real cost at the end. Cost = computed
input tokens + 2 x output tokens.

**Two views of one counter.** The queue goes by what a tenant is *charged*. What it *had* is less by what it
was charged ahead (`ChargedAhead`): the part of running requests not computed yet, which our own engines
report at each step; of other servers progress and end of requests tell.

**Lag.** A tenant without a waiting request whose requests still run asks for less than its share. When it
returns to the queue it may stand below the waiting tenants by as much less as it had meanwhile, at most by
the cost of the KV tokens in flight on all replicas (VTC's U; lag as in Stoica et al., "A proportional share
resource allocation algorithm", RTSS 1996). Two waiting tenants then differ over any time by at most U and two
requests; its requests go first until it has caught up.

Random arrivals leave a tenant with nothing in flight for moments. So it counts as idle, and is owed nothing,
only when all tenants together have had service of U since its last request ended.

A tenant that was idle or is new begins where the first of those that wait stands by what it had (by what it
is charged, the newcomer would pay for tokens that the other has not got). Of equals the one with nothing in
flight goes first. So what each had stays within the same U.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from engine.entry import OUTPUT_TOKEN_COST, cost_of
from engine.scheduling.counters import MAX_TENANTS, ServiceCounters, scaled
from engine.scheduling.order.recent import Recent
from gateway.flow.mclock import MclockReservations
from gateway.flow.placement import Placement
from gateway.flow.types import Displaced, InFlight
from gateway.flow.window import Replica


@dataclass(slots=True)
class _Ahead:
    requests: int = 0
    charged: int = 0
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class KnownLags:
    """The `Lag` of a copy of the queue, which may go to another process."""

    lags: Mapping[str, int]
    below: Mapping[str, int]

    def __call__(self, tenant_id: str, other_id: str) -> int:
        return max(self.lags.get(tenant_id, 0), self.below.get(other_id, 0))


class ChargedAhead:
    """What tenants were charged for in-flight requests and did not have yet, scaled as the counters. Negative
    for a moment when service is reported before its charge; gone with a tenant's last request."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Ahead] = {}

    def begin(self, tenant_id: str, amount: int) -> None:
        self._tenants.setdefault(tenant_id, _Ahead()).requests += 1
        self.charge(tenant_id, amount)

    def charge(self, tenant_id: str, amount: int) -> None:
        """Negative: less."""
        part = self._tenants[tenant_id]
        part.charged += amount
        part.ahead += amount

    def serve(self, tenant_id: str, amount: int) -> None:
        """Nothing if none of its requests is in flight: that was settled."""
        part = self._tenants.get(tenant_id)
        if part is not None:
            part.ahead -= amount

    def end(self, tenant_id: str, amount: int) -> None:
        """A request charged `amount` in all ended; the others' charges bound its unreported rest."""
        part = self._tenants[tenant_id]
        part.requests -= 1
        part.charged -= amount
        part.ahead = max(-part.charged, min(part.ahead, part.charged))
        if not part.requests:
            del self._tenants[tenant_id]

    def of(self, tenant_id: str) -> int:
        part = self._tenants.get(tenant_id)
        return 0 if part is None else part.ahead

    def served(self) -> dict[str, int]:
        """By tenant."""
        return {tenant_id: part.charged - part.ahead for tenant_id, part in self._tenants.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._tenants)

    def __contains__(self, tenant_id: str) -> bool:
        return tenant_id in self._tenants


class Serials:
    """The last serial number of service by tenant and tier (`Submit.heard`); 0 in a new engine life."""

    def __init__(self) -> None:
        self._engines: dict[str, tuple[str, Recent[Mapping[int, int]]]] = {}
        """Replica id -> the engine's life, and the serials of each tenant."""

    def note(self, replica_id: str, life: str, tenant_id: str, serials: Mapping[int, int]) -> None:
        known = self._engines.get(replica_id)
        if known is None or known[0] != life:
            known = self._engines[replica_id] = (life, Recent(MAX_TENANTS))
        known[1].note(tenant_id, serials)

    def of(self, replica_id: str, life: str, tenant_id: str, tier: int) -> int:
        """0 if this life of the engine reported none."""
        known = self._engines.get(replica_id)
        serials = known[1].get(tenant_id) if known is not None and known[0] == life else None
        return serials.get(tier, 0) if serials else 0


class InFlightRequests:
    """Everything dispatched and not finished. One writer: the flow controller."""

    def __init__(
        self, counters: ServiceCounters, placement: Placement, reservations: MclockReservations
    ) -> None:
        self._counters = counters
        self._placement = placement
        self._reservations = reservations
        self.ahead = ChargedAhead()
        self.on_served: Callable[[str, int], None] = lambda tenant_id, amount: None
        """Called with tenants' service (scaled) as it becomes known."""
        self._by_id: dict[str, InFlight] = {}
        self._ended: Recent[int] = Recent(MAX_TENANTS)

    def begin(self, flight: InFlight, replica: Replica, now_s: float) -> None:
        entry = flight.ticket.entry
        self._by_id[entry.entry_id] = flight
        flight.is_reported = replica.reports
        flight.announced_cost = flight.charged_cost
        self._counters.charge(entry.tenant_id, entry.weight, flight.charged_cost)
        self.ahead.begin(entry.tenant_id, scaled(flight.charged_cost, entry.weight))
        if flight.by_reservation:
            self._reservations.granted(entry.tenant_id, flight.charged_cost, now_s)
        self._placement.add(flight, flight.live_sequences, flight.kv_tokens)
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
        self._recount(flight, live_sequences)
        flight.beyond_cost = max(flight.beyond_cost, flight.charged_cost - flight.announced_cost)
        if not flight.is_reported and output_tokens:
            self._had(flight, cost_of(entry.input_tokens, output_tokens))
        return emitted

    def foresee(self, flight: InFlight, foreseen_tokens: tuple[int, int]) -> None:
        """The engine's new forecast (p50, p90), within what can come: corrects charge, holdings, router."""
        most = flight.ticket.max_tokens * flight.ticket.sequences
        median = max(flight.output_tokens, 1, min(foreseen_tokens[0], most))
        flight.foreseen_tokens = (median, max(median, min(foreseen_tokens[1], most)))
        self._recount(flight, flight.live_sequences)
        flight.announced_cost = flight.charged_cost
        self._placement.scorer.foreseen(flight.ticket.entry.entry_id, median - flight.output_tokens)

    def _recount(self, flight: InFlight, live_sequences: int) -> None:
        ticket = flight.ticket
        expected = max(flight.predicted_output_tokens, flight.output_tokens)
        more = expected - ticket.entry.predicted_output_tokens
        cost = ticket.entry.predicted_cost + more * OUTPUT_TOKEN_COST
        if cost != flight.charged_cost:
            self._charge(flight, cost - flight.charged_cost)
            flight.charged_cost = cost
        kv_tokens = max(expected, ticket.kv_tokens + more) * live_sequences // ticket.sequences
        ended = flight.live_sequences - live_sequences
        self._placement.add(flight, -ended, kv_tokens - flight.kv_tokens)
        flight.live_sequences, flight.kv_tokens = live_sequences, kv_tokens

    def serve(self, tenant_id: str, amount: int) -> None:
        self.ahead.serve(tenant_id, amount)
        self.on_served(tenant_id, amount)

    def finish(self, flight: InFlight, input_tokens: int, output_tokens: int, now_s: float) -> int:
        """A request is over: corrects its charge to what was really computed and emitted, and returns it."""
        entry = flight.ticket.entry
        del self._by_id[entry.entry_id]
        cost = cost_of(input_tokens, output_tokens)
        if cost != flight.charged_cost:
            self._charge(flight, cost - flight.charged_cost)
        if not flight.is_reported:
            self._had(flight, cost)
        self.ahead.end(entry.tenant_id, scaled(cost, entry.weight))
        if entry.tenant_id not in self.ahead:
            self._ended.note(entry.tenant_id, self._counters.served_cost)
        if flight.by_reservation:
            self._reservations.ended(entry.tenant_id, now_s)
        self._placement.add(flight, -flight.live_sequences, -flight.kv_tokens)
        self._placement.scorer.ended(entry.entry_id)
        return cost

    def displaced_by(
        self, rank: int, sequences: int, kv_tokens: int, replica: Replica
    ) -> tuple[Displaced, ...]:
        """Requests of lower tiers that one of `rank` displaces, lowest and latest first, until it fits."""
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
        """How far below the others a returning tenant may stand, on the counters' scale. O(replicas)."""
        most = self._placement.kv_tokens * OUTPUT_TOKEN_COST
        if tenant_id not in self.ahead:
            ended = self._ended.get(tenant_id)
            if ended is None or self._counters.served_cost - ended >= most:
                return 0
        return scaled(most, weight)

    def lags(self, weight_of: Callable[[str], float]) -> KnownLags:
        """Those that count now, as plain values."""
        present = {*self.ahead, *self._ended}
        return KnownLags(
            {tenant_id: lag for tenant_id in present if (lag := self.lag(tenant_id, weight_of(tenant_id)))},
            {tenant_id: self.below(tenant_id) for tenant_id in self.ahead},
        )

    def below(self, tenant_id: str) -> int:
        """How far below a waiting tenant one that was idle may start: at that one's counter by what it had,
        and before it where something of it is in flight."""
        return max(self.ahead.of(tenant_id), int(tenant_id in self.ahead))

    def get(self, entry_id: str) -> InFlight | None:
        return self._by_id.get(entry_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[InFlight]:
        return iter(self._by_id.values())

    def __contains__(self, entry_id: str) -> bool:
        return entry_id in self._by_id

    def _charge(self, flight: InFlight, cost: int) -> None:
        entry = flight.ticket.entry
        self._counters.charge(entry.tenant_id, entry.weight, cost)
        self.ahead.charge(entry.tenant_id, scaled(cost, entry.weight))
        if flight.by_reservation:
            self._reservations.corrected(entry.tenant_id, cost)

    def _had(self, flight: InFlight, cost: int) -> None:
        """For servers that report no service."""
        entry = flight.ticket.entry
        self.serve(entry.tenant_id, scaled(cost - flight.had_cost, entry.weight))
        flight.had_cost = cost
