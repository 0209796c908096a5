"""The limits that bind a key (its own, its project's, its tenant's, the platform's) and which binds first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gateway.console.pages.tenant_parts.amounts import SUBJECTS, amount_text, narrowed, what_of
from gateway.http.asgi import Request
from gateway.response_headers import tightness
from gateway.routes.context import gateway_of
from tenants.nouns.key import ApiKey
from tenants.quota.store import LimitState, QuotaStoreUnavailable
from tenants.types import PLATFORM, Limit, LimitMode, SubjectKind

MOST_STATES = 2_000
"""Counters read for one page."""
UNLIMITED = "unlimited: no hard limit on its path"


@dataclass(frozen=True)
class PathLimit:
    limit_id: str
    """Empty: hidden from this person."""
    level: str
    what: str
    amount: int
    amount_words: str
    mode: LimitMode
    used: int | None
    """None: unknown, or hidden from this person."""
    held: int
    used_words: str
    binds_first: bool


def path_of(key: ApiKey, limits: Iterable[Limit]) -> list[Limit]:
    """The limits that bind the key's requests for any end user."""
    subjects = {
        (SubjectKind.KEY, key.key_id),
        (SubjectKind.PROJECT, key.project_id),
        (SubjectKind.TENANT, key.tenant_id),
        (SubjectKind.PLATFORM, PLATFORM),
    }
    levels = list(SUBJECTS)
    binding = [limit for limit in limits if (limit.kind, limit.subject_id) in subjects]
    return sorted(binding, key=lambda limit: -levels.index(limit.kind))


def first_to_bind(states: Iterable[LimitState]) -> LimitState | None:
    """The hard limit with the smallest share left."""
    return min((state for state in states if state.limit.mode is LimitMode.HARD), key=tightness, default=None)


def shown_path(
    limits: Sequence[Limit], states: Mapping[str, LimitState], *, shows_platform: bool
) -> list[PathLimit]:
    """Of the platform's limits a tenant's people see only whether there is room."""
    first = first_to_bind(states[limit.identity] for limit in limits if limit.identity in states)
    return [
        _shown(
            limit,
            states.get(limit.identity),
            is_first=first is not None and first.limit.identity == limit.identity,
            is_open=shows_platform or limit.kind is not SubjectKind.PLATFORM,
        )
        for limit in limits
    ]


def _shown(limit: Limit, state: LimitState | None, *, is_first: bool, is_open: bool) -> PathLimit:
    if not is_open:
        is_full = state is not None and not state.available
        words = "no room left" if is_full else "has room"
        return PathLimit(
            "", SUBJECTS[limit.kind], "all tenants together", 0, "", limit.mode, None, 0, words, is_first
        )
    used_words = "its counter is not known at the moment"
    if state is not None:
        used_words = (
            f"{amount_text(limit.meter, state.used)} of {amount_text(limit.meter, limit.amount)} used"
        )
        if state.held:
            used_words += f", {amount_text(limit.meter, state.held)} held by running requests"
    only = narrowed(limit)
    return PathLimit(
        limit.limit_id,
        SUBJECTS[limit.kind],
        f"{what_of(limit)}, only {only}" if only else what_of(limit),
        limit.amount,
        amount_text(limit.meter, limit.amount),
        limit.mode,
        None if state is None else state.used,
        0 if state is None else state.held,
        used_words,
        is_first,
    )


def words_of(path: Sequence[PathLimit]) -> str:
    """The limit that binds first, in one line."""
    first = next((limit for limit in path if limit.binds_first), None)
    if first is None:
        hard = [limit for limit in path if limit.mode is LimitMode.HARD]
        return f"{len(hard)} limits on its path" if hard else UNLIMITED
    if not first.amount_words:
        return f"{first.level}: {first.used_words}"
    return f"{first.level}: {first.amount_words} {first.what}"


async def paths_of(
    request: Request, keys: Sequence[ApiKey], *, shows_platform: bool
) -> dict[str, list[PathLimit]]:
    """By key id, the limits that bind each key. One query of the quota store."""
    deps = gateway_of(request).deps
    now_s = deps.wall_clock()
    tenant_ids = sorted({key.tenant_id for key in keys})
    of_tenant = {tenant_id: deps.directory.limits(now_s, tenant_id) for tenant_id in (*tenant_ids, PLATFORM)}
    paths = {key.key_id: path_of(key, [*of_tenant[key.tenant_id], *of_tenant[PLATFORM]]) for key in keys}
    distinct = {limit.identity: limit for path in paths.values() for limit in path}
    try:
        states = await deps.quota_store.states(list(distinct.values())[:MOST_STATES])
    except QuotaStoreUnavailable:
        states = ()
    by_identity = {state.limit.identity: state for state in states}
    return {
        key_id: shown_path(path, by_identity, shows_platform=shows_platform) for key_id, path in paths.items()
    }
