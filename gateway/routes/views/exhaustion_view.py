"""When the limit that binds first will be used up, for a tenant's own key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tenants.admin.admin import Admin
from tenants.errors import DatabaseUnavailable
from tenants.instants import from_us
from tenants.quota.projection import Exhaustion, ObservedUse, projected_exhaustion
from tenants.quota.rules import window_bounds_us
from tenants.quota.store import LimitState
from tenants.resources.records.usage import UsageAsked, usage_page
from tenants.types import Limit, Meter, SubjectKind, Window
from tenants.usage.sums import AMOUNTS, COUNTED_AS, DAY_US, HOUR_US

DAYS_OR_LONGER = frozenset({Window.DAY, Window.MONTH, Window.LIFETIME})
"""Windows long enough for a projection from two days."""


def exhaustion_of(state: LimitState, now_us: int, recent: Sequence[ObservedUse] = ()) -> dict[str, Any]:
    """Projected instants and their basis. `recent`: further use of the limit (`recent_use`)."""
    limit = state.limit
    if limit.window is None:
        exhaustion = Exhaustion(
            None, None, "a rate refills by itself" if limit.is_bucket else "requests that end give it back"
        )
    else:
        left = limit.amount - state.used - state.held
        so_far = _so_far(state, now_us)
        observed = ([] if so_far is None else [so_far]) + list(recent)
        exhaustion = projected_exhaustion(left, observed, state.reset_s)
    return {
        "p50": _instant(exhaustion.p50_s, now_us),
        "p90": _instant(exhaustion.p90_s, now_us),
        "basis": exhaustion.basis,
    }


async def recent_use(admin: Admin, limit: Limit, now_us: int) -> list[ObservedUse]:
    """Use of a tenant's window in this and the previous hour, of a project's or key's in this and the
    previous day. Empty for other limits, and while the database is unavailable."""
    begin_us = _recent_since_us(limit, now_us)
    if begin_us is None:
        return []
    of_tenant = limit.kind is SubjectKind.TENANT
    asked = UsageAsked(
        since=from_us(begin_us).isoformat(),
        window="hour" if of_tenant else "day",
        tenant=limit.tenant_id,
        project=limit.subject_id if limit.kind is SubjectKind.PROJECT else None,
        key=limit.subject_id if limit.kind is SubjectKind.KEY else None,
        model=limit.model,
        tier=None if limit.tier is None else limit.tier.value,
    )
    try:
        rows = (await usage_page(admin, asked)).rows
    except DatabaseUnavailable:
        return []
    sums = {name: sum(row.amounts[at] for row in rows) for at, name in enumerate(AMOUNTS)}
    # An adjustment gives back what was used earlier: it is no use below nothing.
    amount = max(0, sum(sums[name] for name in COUNTED_AS[limit.meter]))
    requests = max(0, sums["requests"])
    what = "this hour and the one before" if of_tenant else "today and the day before (UTC)"
    return [ObservedUse(what, amount, (now_us - begin_us) / 1e6, requests)]


def _recent_since_us(limit: Limit, now_us: int) -> int | None:
    """None: no sums are kept for such a limit, or they add nothing to its counter."""
    if limit.window is None or limit.above_tokens:
        return None
    if limit.kind is SubjectKind.TENANT:
        return now_us // HOUR_US * HOUR_US - HOUR_US
    begin_us = now_us // DAY_US * DAY_US - DAY_US
    is_kept = limit.kind in (SubjectKind.PROJECT, SubjectKind.KEY) and limit.window in DAYS_OR_LONGER
    return begin_us if is_kept and limit.created_us <= begin_us else None


def counts_since_us(limit: Limit, now_us: int) -> int:
    """Start of the counter of a limit's window; 0: unknown."""
    assert limit.window is not None
    start_us, _ = window_bounds_us(limit.window, limit.time_zone, now_us)
    return max(start_us, limit.created_us)


def _so_far(state: LimitState, now_us: int) -> ObservedUse | None:
    since_us = counts_since_us(state.limit, now_us)
    if not since_us or since_us >= now_us:
        return None
    requests = state.used if state.limit.meter is Meter.REQUESTS else None
    return ObservedUse("this window so far", state.used, (now_us - since_us) / 1e6, requests)


def _instant(seconds: float | None, now_us: int) -> str | None:
    if seconds is None or not math.isfinite(seconds):
        return None
    return from_us(now_us + round(seconds * 1e6)).isoformat()
