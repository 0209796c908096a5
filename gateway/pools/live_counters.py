"""What waits, runs and is served now, of one gateway and of all together. Pure.

A replica is counted once, as seen by the gateway that knows most of its steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from engine.messages import TIER_RANKS
from gateway.explain.minutes.engine_meter import EngineTotals, kv_permille
from gateway.explain.shares import RecentService
from gateway.metrics.waits import first_token_s

if TYPE_CHECKING:
    from gateway.background import Site
    from gateway.metrics.registry import Metrics
    from gateway.pools.pool import ModelPool
    from gateway.upstream.base import Upstream

MAX_TENANT_ROWS = 500
"""Per gateway: those with the most service and the longest queues."""


class TenantNow(msgspec.Struct, frozen=True):
    """A tenant in one tier, over all models."""

    tenant_id: str
    tier: str
    weight: float
    queued: int = 0
    running: int = 0
    had: float = 0.0
    """Cost tokens of about the last minute, weighted to the recent."""
    due: float = 0.0
    """Its ideal share of the same service."""
    arrivals: int = 0
    """Requests queued in this minute and the previous one."""
    before_line_us: int = 0
    """Their time from first byte to the queue, without their tenant's limits."""

    def plus(self, other: TenantNow) -> TenantNow:
        return TenantNow(
            self.tenant_id,
            self.tier,
            max(self.weight, other.weight),
            self.queued + other.queued,
            self.running + other.running,
            self.had + other.had,
            self.due + other.due,
            self.arrivals + other.arrivals,
            self.before_line_us + other.before_line_us,
        )


class ReplicaNow(msgspec.Struct, frozen=True):
    """Totals are since its engine started; other servers report none."""

    pool: str
    replica_id: str
    address: str
    is_up: bool
    is_drained: bool = False
    running: int = 0
    waiting: int = 0
    kv_share: float = 0.0
    """Share of its KV cache in use."""
    steps: int = 0
    batch_sum: int = 0
    preemptions: int = 0
    name: str = ""
    """See `Upstream.name`."""


class GatewayNow(msgspec.Struct, frozen=True):
    gateway_id: str
    address: str
    clock_s: float
    """For rates between two answers."""
    output_tokens: int
    """By its requests since it started."""
    queued: dict[str, int]
    running: int
    lag_s: float
    """The longest event loop lag of the last seconds."""
    tenants: list[TenantNow] = []
    left_out: int = 0
    """Tenants and tiers beyond `MAX_TENANT_ROWS`."""
    replicas: list[ReplicaNow] = []
    first_tokens: list[tuple[int, int]] = []
    """Of the last minutes (`RecentFirstTokens`)."""


class FleetNow(msgspec.Struct, frozen=True):
    gateways: list[GatewayNow]
    """Those that answered, by id."""
    missing: int
    """Live ones that did not answer."""
    tenants: list[TenantNow]
    replicas: list[ReplicaNow]

    @property
    def queued(self) -> dict[str, int]:
        sums: Counter[str] = Counter()
        for gateway in self.gateways:
            sums.update(gateway.queued)
        return {tier: sums[tier] for tier in TIER_RANKS}

    @property
    def running(self) -> int:
        return sum(gateway.running for gateway in self.gateways)

    def first_token_s(self, share: float) -> float | None:
        """That quantile of the last minutes; None: there was no request."""
        return first_token_s((each for gateway in self.gateways for each in gateway.first_tokens), share)


def counters_of(site: Site, pools: Mapping[str, ModelPool], metrics: Metrics) -> GatewayNow:
    rows: dict[tuple[str, str], TenantNow] = {}
    queued: Counter[str] = Counter()
    output_tokens = running = 0
    for pool in pools.values():
        running += len(pool.flow.in_flight)
        queued.update(dict(zip(TIER_RANKS, pool.flow.queue.queued_by_tier(), strict=True)))
        for flow in pool.flow.tenants.all():
            output_tokens += flow.output_tokens + flow.running_output_tokens
        for row in _tenants_of(pool):
            whose = (row.tenant_id, row.tier)
            rows[whose] = rows[whose].plus(row) if whose in rows else row
    busiest = sorted(rows.values(), key=lambda row: (-row.queued, -row.running, -row.had, row.tenant_id))
    return GatewayNow(
        site.gateway_id,
        site.address,
        site.clock(),
        output_tokens,
        dict(queued),
        running,
        metrics.recent_lag.most_s,
        busiest[:MAX_TENANT_ROWS],
        max(0, len(busiest) - MAX_TENANT_ROWS),
        [_replica(name, upstream) for name, pool in pools.items() for upstream in pool.spec.upstreams],
        metrics.first_tokens.counts(site.clock()),
    )


def _tenants_of(pool: ModelPool) -> Iterable[TenantNow]:
    came = pool.meters.flow.recent_arrivals()
    had = pool.meters.shares.recent
    nothing = RecentService()
    for flow in pool.flow.tenants.all():
        for tier, rank in TIER_RANKS.items():
            whose = (flow.tenant_id, rank)
            recent, (arrivals, before_line_us) = (
                had.get(whose, nothing),
                came.get(whose, (0, 0)),
            )
            if flow.queued[rank] or flow.running[rank] or arrivals or recent is not nothing:
                yield TenantNow(
                    flow.tenant_id,
                    tier,
                    flow.weight,
                    flow.queued[rank],
                    flow.running[rank],
                    recent.had,
                    recent.due,
                    arrivals,
                    before_line_us,
                )


def _replica(pool: str, upstream: Upstream) -> ReplicaNow:
    snapshot = upstream.snapshot
    row = ReplicaNow(
        pool,
        upstream.replica_id,
        upstream.address,
        upstream.is_up,
        upstream.is_drained,
        name=upstream.name,
    )
    if snapshot is None:
        return row
    totals = EngineTotals.of(snapshot)
    return msgspec.structs.replace(
        row,
        running=len(snapshot.running),
        waiting=len(snapshot.waiting),
        kv_share=kv_permille(upstream.ready, snapshot) / 1000,
        steps=totals.steps,
        batch_sum=totals.batch_sum,
        preemptions=totals.preemptions,
    )


def merged(answers: Iterable[GatewayNow], missing: int) -> FleetNow:
    gateways = {answer.gateway_id: answer for answer in answers}
    tenants: dict[tuple[str, str], TenantNow] = {}
    replicas: dict[tuple[str, str], ReplicaNow] = {}
    for gateway in gateways.values():
        for row in gateway.tenants:
            whose = (row.tenant_id, row.tier)
            tenants[whose] = tenants[whose].plus(row) if whose in tenants else row
        for replica in gateway.replicas:
            where = (replica.pool, replica.name or replica.replica_id)
            seen = replicas.get(where)
            if seen is None or (replica.is_up, replica.steps) > (seen.is_up, seen.steps):
                replicas[where] = replica
    return FleetNow(
        sorted(gateways.values(), key=lambda gateway: gateway.gateway_id),
        missing,
        list(tenants.values()),
        sorted(replicas.values(), key=lambda replica: (replica.pool, replica.replica_id)),
    )
