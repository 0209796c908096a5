"""Views of the queue that decide nothing: per-tenant counts for status pages, tokens ahead of a request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.entry import COUNTER_SCALE, INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, QueueEntry
from gateway.flow.types import InFlight, TokensAhead
from gateway.flow.window import NUM_RANKS

MAX_IDLE_TENANTS = 10_000
"""Tenants whose totals are remembered while they have nothing queued or running."""

NONE_QUEUED = [0] * NUM_RANKS


@dataclass(slots=True)
class TenantFlow:
    tenant_id: str
    weight: float = 1.0
    queued: list[int] = field(default_factory=lambda: [0] * NUM_RANKS)
    """By the requested tier."""
    running: list[int] = field(default_factory=lambda: [0] * NUM_RANKS)
    """By the requested tier."""
    served: list[int] = field(default_factory=lambda: [0] * NUM_RANKS)
    """Cost tokens had, by that tier: output as it comes, the prompt with its first token. What a cache had of
    it is taken off at the request's end."""
    dispatched: int = 0
    finished: int = 0
    service_cost: int = 0
    """Of finished requests, as really computed and emitted."""
    running_output_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def num_queued(self) -> int:
        return sum(self.queued)

    @property
    def is_idle(self) -> bool:
        return not any(self.running) and not any(self.queued)


class TenantFlows:
    """Idle tenants are forgotten when there are too many."""

    def __init__(self) -> None:
        self._tenants: dict[str, TenantFlow] = {}
        self.served_cost = 0
        """Cost tokens had by all, as `TenantFlow.served`."""

    def of(self, entry: QueueEntry) -> TenantFlow:
        tenant = self._tenants.get(entry.tenant_id)
        if tenant is None:
            tenant = self._tenants[entry.tenant_id] = TenantFlow(entry.tenant_id)
        tenant.weight = entry.weight
        return tenant

    def weight(self, tenant_id: str) -> float:
        tenant = self._tenants.get(tenant_id)
        return 1.0 if tenant is None else tenant.weight

    def num_queued(self, tenant_id: str) -> int:
        tenant = self._tenants.get(tenant_id)
        return 0 if tenant is None else tenant.num_queued

    def queued(self, tenant_id: str) -> list[int]:
        tenant = self._tenants.get(tenant_id)
        return NONE_QUEUED if tenant is None else tenant.queued

    def all(self) -> list[TenantFlow]:
        return list(self._tenants.values())

    def dispatched(self, entry: QueueEntry) -> None:
        tenant = self.of(entry)
        tenant.running[entry.tier] += 1
        tenant.dispatched += 1

    def emitted(self, entry: QueueEntry, tokens: int, *, is_first: bool) -> None:
        """Counts emitted tokens; before the first ones also the computed prompt."""
        tenant = self.of(entry)
        tenant.running_output_tokens += tokens
        served = tokens * OUTPUT_TOKEN_COST + (entry.input_tokens * INPUT_TOKEN_COST if is_first else 0)
        tenant.served[entry.tier] += served
        self.served_cost += served

    def finished(self, flight: InFlight, input_tokens: int, output_tokens: int, cost: int) -> None:
        entry = flight.ticket.entry
        tenant = self.of(entry)
        tenant.running[entry.tier] -= 1
        tenant.finished += 1
        tenant.running_output_tokens -= flight.output_tokens
        prompt = entry.input_tokens * INPUT_TOKEN_COST if flight.output_tokens else 0
        rest = cost - prompt - flight.output_tokens * OUTPUT_TOKEN_COST
        tenant.served[entry.tier] += rest
        self.served_cost += rest
        tenant.service_cost += cost
        tenant.input_tokens += input_tokens
        tenant.output_tokens += output_tokens
        if len(self._tenants) > MAX_IDLE_TENANTS:
            self._tenants = {tenant_id: flow for tenant_id, flow in self._tenants.items() if not flow.is_idle}


@dataclass(frozen=True, slots=True)
class TenantLine:
    tenant_id: str
    band: int
    requests: int
    cost: int
    counter: int
    weight: float


def tokens_ahead(
    tenant_id: str, band: int, turn: int | None, lines: Iterable[TenantLine], in_flight: Iterable[InFlight]
) -> TokensAhead:
    """Counts what goes before a request of `tenant_id` in `band`. `lines`: what waits in its band and above,
    without itself; `turn`: its tenant's counter at its turn, up to which others of its band go first; None:
    tenants take no turns, and all of `lines` goes first."""
    own = others = higher = running = 0
    for line in lines:
        if line.tenant_id == tenant_id:
            own += line.cost
        elif line.band < band:
            higher += line.cost
        elif turn is None:
            others += line.cost
        else:
            others += _cost_until(turn, line)
    for flight in in_flight:
        if flight.tier > band:
            continue
        had = flight.output_tokens * OUTPUT_TOKEN_COST
        if had:
            had += flight.ticket.entry.input_tokens * INPUT_TOKEN_COST
        left = max(0, flight.charged_cost - had)
        running += left
        if flight.ticket.entry.tenant_id == tenant_id:
            own += left
        elif flight.tier < band:
            higher += left
        else:
            others += left
    return TokensAhead(own, others, higher, running)


def _cost_until(turn: int, line: TenantLine) -> int:
    """Of a line, the requests that begin while its tenant stands no higher than `turn`, by their mean."""
    if line.counter > turn or not line.requests:
        return 0
    mean = line.cost / line.requests
    begun = int((turn - line.counter) * line.weight / COUNTER_SCALE / mean) + 1
    return line.cost if begun >= line.requests else round(begun * mean)
