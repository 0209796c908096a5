"""How much of limits is used: for operators, and for a tenant's own key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gateway.response_headers import tightness
from gateway.routes.views.exhaustion_view import exhaustion_of, recent_use
from tenants.admin.limits import LimitView
from tenants.nouns.limit import limit_as_json
from tenants.quota import pressure
from tenants.quota.pressure import LimitPressure, may_exhaust
from tenants.quota.rules import is_platforms
from tenants.quota.store import LimitState, QuotaStoreUnavailable
from tenants.types import Limit, LimitMode, Principal, SubjectKind, end_user_id

if TYPE_CHECKING:
    from gateway.gateway import Gateway

MAX_USES_SHOWN = 2_000
"""Counters read for one answer."""
_OF_OPERATORS = ("tenant_id", "override", "thresholds")
"""Hidden from a tenant's own key."""


async def with_uses(gateway: Gateway, views: Sequence[LimitView], end_user: str = "") -> list[dict[str, Any]]:
    """As JSON, with how much of each is used."""
    shown, now_s = [view.limit for view in views], views[0].now_s if views else 0.0
    ids = {limit.limit_id for limit in shown}
    beside = [  # one of the tenants' other limits may bind first
        limit
        for tenant_id in sorted({limit.tenant_id for limit in shown})
        for limit in gateway.deps.directory.limits(now_s, tenant_id)
        if limit.limit_id not in ids
    ][:MAX_USES_SHOWN]
    used = await uses(gateway, [limit.at(now_s) for limit in shown], end_user, beside=beside)
    return [view.as_json() | {"usage": used.get(view.limit.limit_id)} for view in views]


async def uses(
    gateway: Gateway, limits: Sequence[Limit], end_user: str = "", *, beside: Sequence[Limit] = ()
) -> dict[str, dict[str, Any]]:
    """Use by limit id, at most `MAX_USES_SHOWN`; of an end user default that of `end_user`, else how many
    have counters. Empty while the quota store is unavailable. `beside`: limits that may bind before these."""
    store, chosen = gateway.deps.quota_store, limits[:MAX_USES_SHOWN]
    resolved = _of_end_user([*chosen, *beside], end_user)
    try:
        states = await store.states(list(resolved.values()))
        counted = {
            tenant_id: await store.end_users(tenant_id)
            for tenant_id in {limit.tenant_id for limit in chosen if limit.is_default}
        }
    except QuotaStoreUnavailable:
        return {}
    by_id = dict(zip(resolved, states, strict=True))
    first = binding_first(by_id.values())
    most = gateway.deps.config.max_end_users
    return {
        limit.limit_id: use_as_json(by_id[limit.limit_id], first)
        if limit.limit_id in by_id
        else {"end_users": counted[limit.tenant_id], "most_end_users": most}
        for limit in chosen
        if limit.limit_id in by_id or limit.is_default
    }


def binding_first(states: Iterable[LimitState]) -> set[str]:
    """Of each tenant's hard limits (and of the platform's) the one with the smallest share left."""
    first: dict[str, LimitState] = {}
    for state in states:
        tenant_id = state.limit.tenant_id
        if state.limit.mode is LimitMode.HARD and (
            tenant_id not in first or tightness(state) < tightness(first[tenant_id])
        ):
            first[tenant_id] = state
    return {state.limit.identity for state in first.values()}


def use_as_json(state: LimitState, first: set[str]) -> dict[str, Any]:
    return {
        "used": state.used,
        "held": state.held,
        "remaining": state.available,
        "reset_s": _or_never(state.reset_s),
        "refill_per_s": state.refill_per_s,
        "binds_first": state.limit.identity in first,
    }


async def states_to_exhaust(
    gateway: Gateway, tenant_ids: Iterable[str] | None = None
) -> Sequence[LimitState]:
    """Of the limits that can be exhausted, of these tenants and what is below them (None: all, with the
    platform's); empty while the quota store is unavailable."""
    deps = gateway.deps
    whose = [None] if tenant_ids is None else tenant_ids
    now_s = deps.wall_clock()
    limits = [limit for one in whose for limit in deps.directory.limits(now_s, one) if may_exhaust(limit)]
    try:
        return await deps.quota_store.states(limits[:MAX_USES_SHOWN])
    except QuotaStoreUnavailable:
        return []


async def pressures(gateway: Gateway, tenant_ids: Iterable[str] | None = None) -> list[LimitPressure]:
    """How close such limits are to refusing, the closest first. Its reads do not grow with the number of
    tenants. Raises `DatabaseUnavailable`."""
    states, now_us = await states_to_exhaust(gateway, tenant_ids), round(gateway.deps.wall_clock() * 1e6)
    return await gateway.deps.database.read(lambda one: pressure.read(one, states, now_us))


async def own_limits(gateway: Gateway, principal: Principal, end_user: str) -> dict[str, Any]:
    """What a key reads of the limits on its requests. Raises `QuotaStoreUnavailable`."""
    now_s = gateway.deps.wall_clock()
    in_force = [limit.at(now_s) for limit in principal.limits]
    platform = [limit for limit in in_force if is_platforms(limit) and limit.mode is LimitMode.HARD]
    user = end_user_id(principal.tenant_id, end_user) if end_user else ""
    mine = [
        limit
        for limit in in_force
        if not is_platforms(limit)
        and (limit.kind is not SubjectKind.END_USER or limit.is_default or limit.subject_id == user)
    ]
    resolved = _of_end_user(mine, end_user)
    states = await gateway.deps.quota_store.states([*resolved.values(), *platform])
    by_id = dict(zip(resolved, states, strict=False))
    full = [state for state in states[len(resolved) :] if not state.available]
    first = set() if full else binding_first(by_id.values())
    return {
        "object": "list",
        "binds_first": await _first_to_bind(gateway, by_id, first, round(now_s * 1e6)),
        "data": [
            _without(limit_as_json(resolved.get(limit.limit_id, limit)), _OF_OPERATORS)
            | {"usage": use_as_json(by_id[limit.limit_id], first) if limit.limit_id in by_id else None}
            for limit in mine
            if limit.limit_id in by_id or not end_user
        ],
        "platform": {
            "binds": bool(full),
            "reset_s": _or_never(max(state.reset_s for state in full)) if full else None,
        },
    }


async def _first_to_bind(
    gateway: Gateway, by_id: Mapping[str, LimitState], first: set[str], now_us: int
) -> dict[str, Any] | None:
    """The limit that binds first and when it will be used up; None: there is none."""
    for limit_id, state in by_id.items():
        if state.limit.identity in first:
            recent = await recent_use(gateway.deps.admin, state.limit, now_us)
            return {"id": limit_id, "projected_exhaustion": exhaustion_of(state, now_us, recent)}
    return None


def _of_end_user(limits: Iterable[Limit], end_user: str) -> dict[str, Limit]:
    """By limit id, limits with counters: a default as that of `end_user`, unless that one has its own."""
    merged = {limit.limit_id: limit for limit in limits if not limit.is_default}
    if end_user:
        taken = {limit.identity for limit in merged.values()}
        for default in (limit for limit in limits if limit.is_default):
            limit = default.of_end_user(end_user_id(default.tenant_id, end_user))
            if limit.identity not in taken:
                merged[limit.limit_id] = limit
    return merged


def _or_never(reset_s: float) -> float | None:
    return reset_s if math.isfinite(reset_s) else None


def _without(shown: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in shown.items() if name not in names}
