"""Served models with their replicas, aliases and tiers, for operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.messages import TIER_RANKS
from gateway.config import AGEING_S
from gateway.domain.tiers import TIER_NAMES
from gateway.pools.pool import ModelPool, queued_as
from gateway.upstream.base import Upstream
from tenants.admin.platform.drains import Drain
from tenants.errors import Invalid, NotFound
from tenants.nouns.alias import alias_as_json
from tenants.types import Tier

if TYPE_CHECKING:
    from gateway.gateway import Gateway

STATES = {
    "serving": "it gets new requests",
    "draining": "it gets none, and some run there still, or a gateway did not say",
    "drained": "it gets none, and none runs there",
    "away": "it does not serve; `refusal` says why",
}


async def upstreams_of(gateway: Gateway) -> dict[str, Any]:
    """Including drains of replicas that only other gateways have."""
    counts, missing = await gateway.fleet.in_flight()
    drains = {drain.identity: drain for drain in gateway.drains.now}
    known = {
        (pool.name, upstream.name) for pool in gateway.pools.values() for upstream in pool.spec.upstreams
    }
    return {
        "object": "list",
        "data": [_pool(pool, counts, drains, missing) for pool in gateway.pools.values()],
        "drained_elsewhere": [drain.as_json() for drain in gateway.drains.now if drain.identity not in known],
        "gateways_missing": missing,
        "members": [] if gateway.deps.members is None else gateway.deps.members.describe(),
    }


def _pool(
    pool: ModelPool,
    counts: Mapping[tuple[str, str], int],
    drains: Mapping[tuple[str, str], Drain],
    missing: int,
) -> dict[str, Any]:
    return {
        "object": "upstream",
        "pool": pool.name,
        "is_up": pool.has_engine,
        "context_tokens": pool.context_tokens,
        "queued": {tier: counts[pool.name, queued_as(tier)] for tier in TIER_RANKS},
        "replicas": [
            _replica(
                upstream,
                drains.get((pool.name, upstream.name)),
                counts[pool.name, upstream.name],
                missing,
            )
            for upstream in pool.spec.upstreams
        ],
    }


def _replica(upstream: Upstream, drain: Drain | None, running: int, missing: int) -> dict[str, Any]:
    return upstream.describe() | {
        "state": state_of(
            is_up=upstream.is_up,
            is_drained=drain is not None or upstream.is_drained,
            running=running,
            missing=missing,
        ),
        "in_flight": running,
        "drain": None if drain is None else drain.as_json(),
    }


def state_of(*, is_up: bool, is_drained: bool, running: int, missing: int) -> str:
    """A word of `STATES`; `running` requests of all gateways but `missing` of them."""
    if is_drained:
        return "draining" if running or missing else "drained"
    return "serving" if is_up else "away"


def find_replica(gateway: Gateway, name: str) -> tuple[str, Upstream]:
    """Raises `NotFound`."""
    for pool in gateway.pools.values():
        for upstream in pool.spec.upstreams:
            if upstream.replica_id == name:
                return pool.name, upstream
    raise NotFound("replica", name)


def find_drain(gateway: Gateway, name: str) -> Drain:
    """The drain of this gateway's replica, else of others'. Raises `NotFound`, `Invalid` if ambiguous."""
    try:
        pool, upstream = find_replica(gateway, name)
    except NotFound:
        found = [drain for drain in gateway.drains.now if drain.replica == name]
    else:
        found = [drain for drain in gateway.drains.now if drain.identity == (pool, upstream.name)]
    if not found:
        raise NotFound("drain", name)
    if len(found) > 1:
        pools = ", ".join(drain.pool for drain in found)
        raise Invalid(
            "replica", f"drained replicas of {pools} are called {name!r}: ask a gateway that has the one"
        )
    return found[0]


def aliases_of(gateway: Gateway) -> list[dict[str, Any]]:
    """Those in force, and stored ones that are left out here, with the reason."""
    models = gateway.models
    left_out = {name: models.stored[name] for name in models.left_out}
    return [
        {
            "object": "alias",
            "name": name,
            "means": alias_as_json(means),
            "is_stored": name in models.stored,
            "left_out": models.left_out.get(name),
        }
        for name, means in sorted((models.catalogue.aliases | left_out).items())
    ]


def tiers_of(gateway: Gateway) -> list[dict[str, Any]]:
    config, multipliers = gateway.deps.config, gateway.deps.admin.transactions.tier_multipliers
    shares = {brake.tier: brake.share for brake in gateway.brakes.now}
    return [
        {
            "object": "tier",
            "tier": tier.value,
            "service_tier": TIER_NAMES[tier],
            "price_thousandths": multipliers[tier],
            "queue_ttl_s": config.queue_ttl_s[tier],
            "ageing_s": AGEING_S[tier],
            "brake_share": shares.get(tier),
        }
        for tier in Tier
    ]
