"""Per-tenant counts of waiting, running and served requests, for status pages. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.entry import OUTPUT_TOKEN_COST, QueueEntry
from gateway.flow.types import InFlight
from gateway.flow.window import NUM_RANKS

MAX_IDLE_TENANTS = 10_000
"""Tenants whose totals are remembered while they have nothing queued or running."""


@dataclass(slots=True)
class TenantFlow:
    """One tenant's part: what waits, what runs, what it has had."""

    tenant_id: str
    weight: float = 1.0
    queued: list[int] = field(default_factory=lambda: [0] * NUM_RANKS)
    """By the tier that was asked for."""
    running: list[int] = field(default_factory=lambda: [0] * NUM_RANKS)
    """The same of what runs."""
    served: list[int] = field(default_factory=lambda: [0] * NUM_RANKS)
    """Cost tokens had, by that tier: output as it comes, the prompt at the request's end."""
    dispatched: int = 0
    finished: int = 0
    service_cost: int = 0
    """Cost tokens of finished requests, as really computed and emitted."""
    running_output_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def num_queued(self) -> int:
        """In all tiers."""
        return sum(self.queued)

    @property
    def is_idle(self) -> bool:
        return not any(self.running) and not any(self.queued)


class TenantFlows:
    """All tenants known here; idle ones are forgotten when there are too many."""

    def __init__(self) -> None:
        self._tenants: dict[str, TenantFlow] = {}

    def of(self, entry: QueueEntry) -> TenantFlow:
        """The tenant of a request, at its present weight."""
        tenant = self._tenants.get(entry.tenant_id)
        if tenant is None:
            tenant = self._tenants[entry.tenant_id] = TenantFlow(entry.tenant_id)
        tenant.weight = entry.weight
        return tenant

    def weight(self, tenant_id: str) -> float:
        """As its latest request had it; 1 for a tenant that is not known."""
        tenant = self._tenants.get(tenant_id)
        return 1.0 if tenant is None else tenant.weight

    def num_queued(self, tenant_id: str) -> int:
        """How many of its requests wait."""
        tenant = self._tenants.get(tenant_id)
        return 0 if tenant is None else tenant.num_queued

    def all(self) -> list[TenantFlow]:
        """Every tenant known here."""
        return list(self._tenants.values())

    def dispatched(self, entry: QueueEntry) -> None:
        """One more runs."""
        tenant = self.of(entry)
        tenant.running[entry.tier] += 1
        tenant.dispatched += 1

    def emitted(self, entry: QueueEntry, tokens: int) -> None:
        """A running request has emitted so many more."""
        tenant = self.of(entry)
        tenant.running_output_tokens += tokens
        tenant.served[entry.tier] += tokens * OUTPUT_TOKEN_COST

    def finished(self, flight: InFlight, input_tokens: int, output_tokens: int, cost: int) -> None:
        """One is over, with what was really computed and emitted."""
        entry = flight.ticket.entry
        tenant = self.of(entry)
        tenant.running[entry.tier] -= 1
        tenant.finished += 1
        tenant.running_output_tokens -= flight.output_tokens
        tenant.served[entry.tier] += cost - flight.output_tokens * OUTPUT_TOKEN_COST
        tenant.service_cost += cost
        tenant.input_tokens += input_tokens
        tenant.output_tokens += output_tokens
        if len(self._tenants) > MAX_IDLE_TENANTS:
            self._tenants = {each: flow for each, flow in self._tenants.items() if not flow.is_idle}
