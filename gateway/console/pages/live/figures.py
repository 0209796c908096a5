"""What the overview shows, from the counters of all gateways. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.messages import TIER_RANKS
from gateway.pools.live_counters import FleetNow, ReplicaNow, TenantNow


@dataclass(frozen=True, slots=True)
class SlowFigures:
    """Slowly changing figures from the database."""

    spend_nanousd: int | None = None
    """Charged today."""
    attainment: float | None = None
    """Share of judged targets that were met in the report's period; None: none was judged."""
    missed: int = 0
    judged: int = 0
    refusals: Mapping[str, int] = field(default_factory=dict)
    """Of this hour and the previous one, by code."""
    read_us: int | None = None
    """None: the database did not answer."""


@dataclass(frozen=True, slots=True)
class ShareRow:
    tenant_id: str
    name: str
    tier: str
    weight: float
    queued: int
    running: int
    share: float | None
    """Of the tier's recent service; None: it had none and was due none."""
    fair: float | None
    lag_tokens: int
    """Cost tokens behind its fair share; negative: ahead."""
    lag_part: float | None
    """Of the bound 2U; None: the bound is unknown."""
    before_line_s: float | None

    @property
    def row_id(self) -> str:
        return f"{self.tenant_id}/{self.tier}"


@dataclass(frozen=True, slots=True)
class Overview:
    at_us: int
    fleet: FleetNow
    tokens_per_s: float | None
    """Output of all gateways; None: there is no earlier snapshot."""
    jain: float | None
    tenants: tuple[ShareRow, ...]
    replicas: list[tuple[ReplicaNow, float | None]]
    """With their mean batch since the previous snapshot; None: no steps, or none reported."""
    slow: SlowFigures
    left_out: int
    """Tenants and tiers that are not shown."""

    @property
    def answering(self) -> str:
        here = len(self.fleet.gateways)
        return f"{here} of {here + self.fleet.missing}"


def overview_of(
    now: FleetNow, before: FleetNow | None, names: Mapping[str, str], slow: SlowFigures, at_us: int
) -> Overview:
    """`before`: an earlier snapshot, for rates."""
    return Overview(
        at_us,
        now,
        tokens_per_s(now, before),
        jain_index(now.tenants),
        tenant_rows(now.tenants, names),
        replica_rows(now.replicas, () if before is None else before.replicas),
        slow,
        sum(gateway.left_out for gateway in now.gateways),
    )


def tenant_rows(tenants: Sequence[TenantNow], names: Mapping[str, str]) -> tuple[ShareRow, ...]:
    """By name and descending tier: an order that does not depend on the figures."""
    totals = dict.fromkeys(TIER_RANKS, 0.0)
    for tenant in tenants:
        totals[tenant.tier] += tenant.had
    rows = []
    for tenant in tenants:
        total, lag = totals[tenant.tier], tenant.due - tenant.had
        has_part = total > 0 and tenant.had + tenant.due > 0
        rows.append(
            ShareRow(
                tenant.tenant_id,
                names.get(tenant.tenant_id, tenant.tenant_id),
                tenant.tier,
                tenant.weight,
                tenant.queued,
                tenant.running,
                tenant.had / total if has_part else None,
                tenant.due / total if has_part else None,
                round(lag),
                lag / tenant.bound if tenant.bound else None,
                tenant.before_line_us / tenant.arrivals / 1e6 if tenant.arrivals else None,
            )
        )
    return tuple(sorted(rows, key=lambda row: (row.name, row.tenant_id, TIER_RANKS[row.tier])))


def jain_index(tenants: Iterable[TenantNow]) -> float | None:
    """Jain's index of service received over service due: 1 if equal for all, 1/n if one of n had everything.
    None: nothing was due. Jain, Chiu and Hawe, DEC-TR-301, 1984."""
    parts = [tenant.had / tenant.due for tenant in tenants if tenant.due >= 1]
    squares = sum(part * part for part in parts)
    return sum(parts) ** 2 / (len(parts) * squares) if squares else None


def tokens_per_s(now: FleetNow, before: FleetNow | None) -> float | None:
    """Of gateways in both snapshots, each by its own clock."""
    earlier = {} if before is None else {gateway.gateway_id: gateway for gateway in before.gateways}
    rates = [
        max(0, gateway.output_tokens - was.output_tokens) / (gateway.clock_s - was.clock_s)
        for gateway in now.gateways
        if (was := earlier.get(gateway.gateway_id)) is not None and gateway.clock_s > was.clock_s
    ]
    return sum(rates) if rates else None


def replica_rows(
    now: Iterable[ReplicaNow], before: Iterable[ReplicaNow]
) -> list[tuple[ReplicaNow, float | None]]:
    earlier = {(replica.pool, replica.name): replica for replica in before}
    rows = []
    for replica in now:
        was = earlier.get((replica.pool, replica.name))
        steps = 0 if was is None else replica.steps - was.steps
        batch = (replica.batch_sum - was.batch_sum) / steps if was is not None and steps > 0 else None
        rows.append((replica, batch))
    return rows
