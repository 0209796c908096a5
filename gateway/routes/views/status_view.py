"""The current state of every tenant, engine and queue, for operators."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from engine.messages import TIER_RANKS
from gateway.explain.shares import RecentService, TenantTier, recent_of, shares_of
from gateway.flow.controller import FlowController, TenantFlow
from gateway.pools.control_loop import ControlLoop
from gateway.routes.views.workers_view import merged_status
from gateway.upstream.base import Upstream
from tenants.nouns.alias import alias_as_json
from tenants.nouns.limit import limit_as_json
from tenants.quota.store import LimitState, QuotaStoreUnavailable
from tenants.types import PLATFORM

if TYPE_CHECKING:
    from gateway.gateway import Gateway

MAX_LIMITS_SHOWN = 2_000
SHOWN_MOVES = 20
_COUNTS = ("dispatched", "finished", "service_cost", "running_output_tokens", "input_tokens", "output_tokens")


async def status_of(gateway: Gateway, *, active_only: bool = False, own: bool = False) -> dict[str, Any]:
    """Counters: cost tokens per weight. `active_only`: only active or recently served tenants, no limits.
    Of all workers of the port; `own`: this process's part, without limits."""
    workers = gateway.deps.workers
    if workers is None or own:
        return await _status_here(gateway, active_only=active_only, limits=not own, is_part=own)
    here, others = await asyncio.gather(
        _status_here(gateway, active_only=active_only, limits=True, is_part=True),
        workers.siblings.ask(f"/admin/v1/status?active={active_only}"),
    )
    parts = {number: answer.json() for number, answer in others.items() if answer.is_success}
    return merged_status(parts | {workers.seat.number: here}) | {"platform_limits": here["platform_limits"]}


async def _status_here(gateway: Gateway, *, active_only: bool, limits: bool, is_part: bool) -> dict[str, Any]:
    deps = gateway.deps
    queues = [pool.flow for pool in gateway.pools.values()]
    states = {} if active_only or not limits else await _limit_states(gateway)
    meters = [pool.meters.shares for pool in gateway.pools.values()]
    flows, shares, recent = _summed(queues), shares_of(meters), recent_of(meters)
    tenants: list[dict[str, Any]] = []
    for tenant in deps.directory.tenants():
        flow = flows.get(tenant.tenant_id) or TenantFlow(tenant.tenant_id, tenant.weight)
        tiers = _tiers(gateway, flow, shares)
        if is_part:
            for tier, row in tiers.items():
                service = recent.get((tenant.tenant_id, TIER_RANKS[tier]), RecentService())
                row |= {"had": service.had, "due": service.due}
        if tiers or not active_only:
            counter = gateway.pools.first.flow.counters.value(tenant.tenant_id)
            of_tenant = states.get(tenant.tenant_id, [])
            tenants.append(_tenant(flow, tenant.name, counter, of_tenant) | {"tiers": tiers})
    recovery = gateway.presence.report
    part = {"worker": {"pid": os.getpid(), "gateway_id": deps.gateway_id}} if is_part else {}
    return part | {
        "gateway_id": deps.gateway_id,
        "model": deps.model_name,
        "policy": gateway.policy.now.name,
        "policy_from": "stored" if gateway.policy.is_stored else "settings",
        "policy_problem": gateway.policy.problem,
        "clock_s": deps.clock(),
        "queued": {
            tier: sum(flow.queue.queued_by_tier()[rank] for flow in queues)
            for tier, rank in TIER_RANKS.items()
        },
        "running": sum(len(queue.in_flight) for queue in queues),
        "brakes": [brake.as_json() for brake in gateway.brakes.now],
        "settlements_pending": gateway.holds.pending,
        "refusals": dict(sorted(gateway.metrics.refusals_by_code.items())),
        "recovery": None
        if recovery is None
        else {
            "open_reserves": recovery.open_reserves,
            "recovered": recovery.recovered,
            "lost": recovery.lost,
            "left_open": recovery.left_open,
        },
        "engines": [_engine(upstream) for upstream in deps.upstreams],
        "models": models_of(gateway),
        "platform_limits": states.get(PLATFORM, []),
        "tenants": tenants,
    }


async def _limit_states(gateway: Gateway) -> dict[str, list[dict[str, Any]]]:
    """Limits with their counters, by tenant; empty while the quota store is unavailable."""
    deps = gateway.deps
    limits = [limit for limit in deps.directory.limits(deps.wall_clock()) if not limit.is_default]
    states: dict[str, list[dict[str, Any]]] = {}
    try:
        for state in await deps.quota_store.states(limits[:MAX_LIMITS_SHOWN]):
            states.setdefault(state.limit.tenant_id, []).append(_limit(state))
    except QuotaStoreUnavailable:
        return {}
    return states


def _tiers(
    gateway: Gateway, flow: TenantFlow, shares: Mapping[TenantTier, tuple[float, float]]
) -> dict[str, dict[str, Any]]:
    """Active or recently served tiers: share of service against the fair one, estimated and real waits."""
    rows: dict[str, dict[str, Any]] = {}
    for tier, rank in TIER_RANKS.items():
        share = shares.get((flow.tenant_id, rank))
        if share is None and not flow.queued[rank] and not flow.running[rank]:
            continue
        rows[tier] = {
            "queued": flow.queued[rank],
            "running": flow.running[rank],
            "share": None if share is None else share[0],
            "fair_share": None if share is None else share[1],
            "waits": gateway.metrics.waits.of(flow.tenant_id, tier),
        }
    return rows


def _summed(queues: Sequence[FlowController]) -> dict[str, TenantFlow]:
    """Every tenant's sums over the queues of all models. Counters are those of its first model."""
    by_tenant: dict[str, TenantFlow] = {}
    for queue in queues:
        for part in queue.tenants.all():
            whole = by_tenant.setdefault(part.tenant_id, TenantFlow(part.tenant_id, part.weight))
            for by_tier in ("queued", "running", "served"):
                sums = zip(getattr(whole, by_tier), getattr(part, by_tier), strict=True)
                setattr(whole, by_tier, [mine + more for mine, more in sums])
            for name in _COUNTS:
                setattr(whole, name, getattr(whole, name) + getattr(part, name))
    return by_tenant


def _tenant(flow: TenantFlow, name: str, counter: int, limits: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tenant_id": flow.tenant_id,
        "name": name,
        "weight": flow.weight,
        "counter": counter,
        "queued": dict(zip(TIER_RANKS, flow.queued, strict=True)),
        "running": sum(flow.running),
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
        "refill_per_s": state.refill_per_s,
    }


def _control(loop: ControlLoop) -> dict[str, Any]:
    return loop.describe() | {"moves": [asdict(move) for move in list(loop.control.moves)[-SHOWN_MOVES:]]}


def models_of(gateway: Gateway) -> dict[str, Any]:
    shown = {
        pool.name: {
            "is_up": pool.has_engine,
            "context_tokens": pool.context_tokens,
            "long_tokens": pool.flow.queue.lane_rule.long_tokens,
            "queued": dict(zip(TIER_RANKS, pool.flow.queue.queued_by_tier(), strict=True)),
            "running": len(pool.flow.in_flight),
            "control": _control(pool.control),
            "learned": pool.control.learned.as_json(),
            "prompts": "estimated" if pool.spec.is_estimated else "counted",
            "quotes_bind": pool.estimates.binding_tiers(),
            "replicas": [upstream.describe() for upstream in pool.spec.upstreams],
        }
        for pool in gateway.pools.values()
    }
    aliases = {name: alias_as_json(means) for name, means in gateway.models.catalogue.aliases.items()}
    return {"pools": shown, "aliases": aliases}


def forecasts_of(gateway: Gateway) -> dict[str, Any]:
    engines = {
        upstream.replica_id: {"length_probe": snapshot.length_probe, "step_time": snapshot.step_time}
        for pool in gateway.pools.values()
        for upstream in pool.spec.upstreams
        if (snapshot := upstream.snapshot) is not None
    }
    return {"gateway": gateway.builder.lengths.report(), "engines": engines}


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
            "mean_step_time": snapshot.mean_step_time,
            "service": snapshot.service,
        }
    return shown
