"""Service of a step by tenant and gateway, and totals by tenant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.messages import TenantService
from engine.scheduling.step_counters import StepCounters

MAX_TENANT_TOTALS = 1024
"""Tenants whose total service a snapshot names: those served last."""


@dataclass(slots=True)
class ServiceShare:
    """One tenant's service in a step."""

    by_gateway: dict[str, TenantService] = field(default_factory=dict)
    tokens: int = 0
    """All that were computed, recomputation included."""
    decoded_tokens: int = 0
    serials: dict[int, int] = field(default_factory=dict)
    """By tier, as `lifts`: see `StepCounters`."""
    lifts: dict[int, int] = field(default_factory=dict)

    @property
    def total(self) -> TenantService:
        parts = self.by_gateway.values()
        return TenantService(
            sum([part.computed_tokens for part in parts]), sum([part.emitted_tokens for part in parts])
        )


class ServiceTotals:
    def __init__(self) -> None:
        self.totals: dict[str, TenantService] = {}

    def note(
        self, served: Mapping[tuple[str, str], list[int]], standings: StepCounters
    ) -> dict[str, ServiceShare]:
        """Adds a step's service; returns the shares by tenant, those of lifts alone included. `served`: by
        tenant and gateway prompt tokens computed first, tokens emitted, all computed, all decoded."""
        shares: dict[str, ServiceShare] = {}
        for (tenant_id, gateway_id), (computed, emitted, tokens, decoded) in served.items():
            share = shares.setdefault(tenant_id, ServiceShare())
            share.by_gateway[gateway_id] = TenantService(computed, emitted)
            share.tokens += tokens
            share.decoded_tokens += decoded
            before = self.totals.pop(tenant_id, None) or TenantService(0, 0)
            self.totals[tenant_id] = TenantService(
                before.computed_tokens + computed, before.emitted_tokens + emitted
            )
        while len(self.totals) > MAX_TENANT_TOTALS:
            del self.totals[next(iter(self.totals))]
        for (tier, tenant_id), amount in standings.take_raised().items():
            shares.setdefault(tenant_id, ServiceShare()).lifts[tier] = amount
        for tenant_id, share in shares.items():
            share.serials = standings.serials(tenant_id)
        return shares
