"""What is going on right now, for an operator? Numbers of every tenant, engine and queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.messages import TIER_RANKS
from gateway.flow.controller import TenantFlow
from gateway.upstream.base import Upstream
from tenants.quota.store import LimitState, QuotaStoreUnavailable
from tenants.records import limit_as_json

if TYPE_CHECKING:
    from gateway.runtime import Gateway

MAX_LIMITS_SHOWN = 2_000


async def status_of(gateway: Gateway) -> dict[str, Any]:
    """The status page. Counters are those of the queue: cost tokens per weight, scaled."""
    deps = gateway.deps
    flow = gateway.flow
    limits = deps.directory.limits(deps.wall_clock())[:MAX_LIMITS_SHOWN]
    states: dict[str, list[dict[str, Any]]] = {}
    try:
        for state in await deps.quota_store.states(limits):
            states.setdefault(state.limit.tenant_id, []).append(_limit(state))
    except QuotaStoreUnavailable:
        states = {}
    flows = {each.tenant_id: each for each in flow.tenants()}
    tenants = [
        _tenant(
            flows.get(tenant.tenant_id) or TenantFlow(tenant.tenant_id, tenant.weight),
            tenant.name,
            flow.counters.value(tenant.tenant_id),
            states.get(tenant.tenant_id, []),
        )
        for tenant in deps.directory.tenants()
    ]
    recovery = deps.recovery
    return {
        "gateway_id": deps.gateway_id,
        "model": deps.model_name,
        "policy": gateway.policy,
        "clock_s": deps.clock(),
        "queued": dict(zip(TIER_RANKS, flow.queued_by_tier(), strict=True)),
        "running": flow.num_in_flight,
        "settlements_pending": gateway.books.pending,
        "refusals": dict(sorted(gateway.metrics.refusals_by_code.items())),
        "recovery": None
        if recovery is None
        else {
            "open_reserves": recovery.open_reserves,
            "recovered": recovery.recovered,
            "lost": recovery.lost,
            "left_open": recovery.left_open,
        },
        "engines": [_engine(each) for each in deps.upstreams],
        "tenants": tenants,
    }


def _tenant(flow: TenantFlow, name: str, counter: int, limits: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tenant_id": flow.tenant_id,
        "name": name,
        "weight": flow.weight,
        "counter": counter,
        "queued": dict(zip(TIER_RANKS, flow.queued, strict=True)),
        "running": flow.running,
        "dispatched": flow.dispatched,
        "finished": flow.finished,
        "service_cost": flow.service_cost,
        "input_tokens": flow.input_tokens,
        "output_tokens": flow.output_tokens,
        "running_output_tokens": flow.running_output_tokens,
        "limits": limits,
    }


def _limit(state: LimitState) -> dict[str, Any]:
    return limit_as_json(state.limit) | {
        "used": state.used,
        "held": state.held,
        "available": state.available,
        "reset_s": state.reset_s,
    }


def _engine(upstream: Upstream) -> dict[str, Any]:
    ready, snapshot = upstream.ready, upstream.snapshot
    shown: dict[str, Any] = {"replica_id": upstream.replica_id, "is_up": upstream.is_up}
    if ready is not None:
        shown |= {
            "pid": ready.pid,
            "policy": ready.policy,
            "model": ready.model,
            "max_sequences": ready.max_sequences,
            "max_batched_tokens": ready.max_batched_tokens,
            "block_tokens": ready.block_tokens,
        }
    if snapshot is not None:
        shown |= {
            "step": snapshot.step,
            "running": len(snapshot.running),
            "waiting": len(snapshot.waiting),
            "kv_blocks": {
                "total": snapshot.num_blocks,
                "free": snapshot.free_blocks,
                "cached": snapshot.cached_blocks,
                "referenced": snapshot.referenced_blocks,
            },
            "preemptions": snapshot.preemptions,
            "steps_with_mixed_batch": snapshot.steps_with_mixed_batch,
            "step_time": snapshot.step_time,
            "service": snapshot.service,
        }
    return shown
