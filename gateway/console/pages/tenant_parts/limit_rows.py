"""Limits as gauges: as set, active, used, and which binds first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.console.pages.tenant_parts.amounts import amount_text, narrowed, subject_text, what_of
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.routes.context import gateway_of
from gateway.routes.views.exhaustion_view import counts_since_us
from gateway.routes.views.limits_view import uses
from tenants.admin.admin import Admin
from tenants.admin.limits import LimitView
from tenants.admin.lists.usage import MOST_HOUR_ROWS
from tenants.errors import DatabaseUnavailable, Invalid
from tenants.instants import from_us, to_us
from tenants.nouns.limit import limit_as_json
from tenants.nouns.tenant import Tenant
from tenants.quota import pressure
from tenants.quota.pressure import Level, LimitPressure, day_start_us
from tenants.quota.projection import (
    HOUR_US,
    LEAST_WEEKS,
    MOST_WEEKS,
    WEEK_HOURS,
    Exhaustion,
    ObservedUse,
    exhaustion_by_week,
    projected_exhaustion,
    weeks_of,
    whole_weeks,
)
from tenants.quota.rules import is_platforms, window_bounds_us
from tenants.quota.store import LimitState
from tenants.types import PLATFORM, Limit, LimitMode, Meter, SubjectKind
from tenants.usage.read import UsageRow
from tenants.usage.sums import AMOUNTS, COUNTED_AS


@dataclass(frozen=True)
class UseHistory:
    """Usage by hour, model and tier."""

    rows: tuple[UsageRow, ...]
    weeks: int
    """Whole weeks before the current hour."""

    def by_hour(self, limit: Limit) -> dict[int, int]:
        """What the limit's meter counts of the requests it binds, by start of the hour."""
        places = [AMOUNTS.index(name) for name in COUNTED_AS[limit.meter]]
        sums: dict[int, int] = {}
        for row in self.rows:
            start_us, model, tier = row.key
            if limit.model in (None, model) and (limit.tier is None or limit.tier.value == tier):
                sums[start_us] = sums.get(start_us, 0) + sum(row.amounts[place] for place in places)
        return sums


NOT_KEPT = UseHistory((), 0)


async def history_of(admin: Admin, tenant: Tenant, now_us: int) -> UseHistory:
    """The last four weeks, or the tenant's whole age. One statement."""
    weeks = whole_weeks(to_us(tenant.created_at), now_us)
    this_hour_us = now_us // HOUR_US * HOUR_US
    if weeks < LEAST_WEEKS:
        return UseHistory((), weeks)
    since_us = this_hour_us - MOST_WEEKS * WEEK_HOURS * HOUR_US
    try:
        rows = await admin.usage.hours(tenant.tenant_id, since_us, this_hour_us)
    except (DatabaseUnavailable, Invalid):  # hours that are not kept any more, and are too many to add up
        return NOT_KEPT
    return NOT_KEPT if len(rows) >= MOST_HOUR_ROWS else UseHistory(tuple(rows), weeks)


def projection_of(
    limit: Limit, usage: Mapping[str, float | None], history: UseHistory, now_us: int
) -> Exhaustion:
    """`usage`: the limit's counter as shown."""
    if limit.window is None:
        says = "a rate refills by itself" if limit.is_bucket else "requests that end give it back"
        return Exhaustion(None, None, says)
    used, left, reset_s = usage["used"] or 0, usage["remaining"] or 0, usage["reset_s"]
    ends_in_s = float("inf") if reset_s is None else reset_s
    if limit.kind is SubjectKind.TENANT and not limit.above_tokens and limit.meter is not Meter.CONCURRENCY:
        weeks = weeks_of(history.by_hour(limit), now_us, history.weeks)
        exhaustion = exhaustion_by_week(int(left), weeks, now_us, ends_in_s)
        if left <= 0 or history.weeks >= LEAST_WEEKS:
            return exhaustion
        why = exhaustion.basis
    else:
        why = "usage by the hour is kept for whole tenants, tiers and models"
    since_us = counts_since_us(limit, now_us)  # 0: not known
    observed = [ObservedUse("this window so far", int(used), (now_us - since_us) / 1e6)] if since_us else []
    plain = projected_exhaustion(int(left), observed, ends_in_s)
    return Exhaustion(plain.p50_s, None, f"{why}; {plain.basis}")


def projections(
    limits: Iterable[Limit], uses: Mapping[str, Mapping[str, float | None]], history: UseHistory, now_us: int
) -> dict[str, Exhaustion]:
    """By limit id, of those whose counters are known."""
    return {
        limit.limit_id: projection_of(limit, uses[limit.limit_id], history, now_us)
        for limit in limits
        if "used" in uses.get(limit.limit_id, {})
    }


@dataclass(frozen=True)
class LimitRow:
    limit_id: str
    subject: str
    what: str
    narrowed: str
    mode: LimitMode
    amount: int
    """Active, with overrides."""
    amount_words: str
    set_words: str
    """Empty: no override is active."""
    overridden_until_us: int | None
    reason: str
    used: int | None
    """None: unknown, or counted per end user."""
    held: int
    used_words: str
    refill_words: str
    """A bucket's current refill rate; empty: no bucket, or unknown."""
    resets_us: int | None
    """None: no window, or unknown."""
    binds_first: bool
    used_up_us: int | None
    """Median."""
    used_up_late_us: int | None
    """90th percentile."""
    basis: str
    """What the projection is based on."""
    level: Level
    refused: int
    """Requests that it refused today."""
    refusals: str
    """Link to them."""
    refuses_since_us: int | None


def row_of(
    limit: Limit,
    now_us: int,
    usage: Mapping[str, Any] | None,
    projection: Exhaustion | None,
    name: str | None,
    *,
    shows_reasons: bool = True,
    under: LimitPressure | None = None,
) -> LimitRow:
    """`usage`: its counter (`limits_view.use_as_json`); `name`: of its subject."""
    in_force, override = limit.at(now_us / 1e6), limit.override
    if override is not None and now_us >= override.until_us:
        override = None
    known = usage is not None and "used" in usage
    resets_us = None
    if usage is not None and known and limit.window is not None and usage["reset_s"] is not None:
        resets_us = window_bounds_us(limit.window, limit.time_zone, now_us)[1]
    return LimitRow(
        limit_id=limit.limit_id,
        subject=subject_text(limit, name),
        what=what_of(in_force),
        narrowed=narrowed(limit),
        mode=limit.mode,
        amount=in_force.amount,
        amount_words=amount_text(limit.meter, in_force.amount),
        set_words="" if override is None else amount_text(limit.meter, limit.amount),
        overridden_until_us=None if override is None else override.until_us,
        reason="" if override is None or not shows_reasons else override.reason,
        used=usage["used"] if usage is not None and known else None,
        held=usage["held"] if usage is not None and known else 0,
        used_words=_used_words(in_force, usage),
        refill_words=_refill_words(in_force, usage),
        resets_us=resets_us,
        binds_first=bool(usage and usage.get("binds_first")),
        used_up_us=None if projection is None else _instant(projection.p50_s, now_us),
        used_up_late_us=None if projection is None else _instant(projection.p90_s, now_us),
        basis="" if projection is None else projection.basis,
        level=Level.FREE if under is None else under.level,
        refused=0 if under is None else under.refused,
        refusals=refusals_of(limit, now_us),
        refuses_since_us=None if under is None else under.since_us,
    )


def refusals_of(limit: Limit, now_us: int) -> str:
    """The list of what it refused today."""
    owner = {} if is_platforms(limit) else {"tenant": limit.tenant_id}
    today = from_us(day_start_us(now_us)).isoformat()
    return with_query("/console/refusals", owner | {"limit_id": limit.limit_id, "from": today})


def _used_words(limit: Limit, usage: Mapping[str, Any] | None) -> str:
    if usage is None:
        return "its counter is not known at the moment"
    if "used" not in usage:
        return f"{usage['end_users']:,} end users have counters of their own"
    text = f"{amount_text(limit.meter, usage['used'])} of {amount_text(limit.meter, limit.amount)} used"
    held = usage["held"]
    return f"{text}, {amount_text(limit.meter, held)} held by running requests" if held else text


def _refill_words(limit: Limit, usage: Mapping[str, Any] | None) -> str:
    refill_per_s = None if usage is None else usage.get("refill_per_s")
    return "" if refill_per_s is None else f"{amount_text(limit.meter, refill_per_s)} a second"


def _instant(in_s: float | None, now_us: int) -> int | None:
    return None if in_s is None else now_us + round(in_s * 1e6)


def binding(rows: Iterable[LimitRow]) -> LimitRow | None:
    return next((row for row in rows if row.binds_first), None)


async def rows_of_tenant(
    request: Request,
    tenant: Tenant | None,
    views: Sequence[LimitView],
    *,
    projected: bool = True,
    shows_reasons: bool = True,
) -> list[LimitRow]:
    """The limit that binds first is looked for among all of the tenant's limits. `tenant` None: of the
    platform, whose use by hour is not projected."""
    gateway = gateway_of(request)
    now_s = gateway.deps.wall_clock()
    now_us = round(now_s * 1e6)
    shown = [view.limit for view in views]
    ids = {limit.limit_id for limit in shown}
    in_force = [limit.at(now_s) for limit in shown]
    whose = PLATFORM if tenant is None else tenant.tenant_id
    every = gateway.deps.directory.limits(now_s, whose)
    beside = [limit for limit in every if limit.limit_id not in ids]
    used = await uses(gateway, in_force, beside=beside)
    states = [
        LimitState(limit, one["used"], one["held"], one["remaining"], one["reset_s"] or 0.0)
        for limit in in_force
        if "used" in (one := used.get(limit.limit_id, {}))
    ]
    # Requests of any tenant meet the platform's limits.
    of_tenant = None if tenant is None else tenant.tenant_id
    pressures = await gateway.deps.database.read(lambda one: pressure.read(one, states, now_us, of_tenant))
    by_id = {each.limit.limit_id: each for each in pressures}
    forecasts: dict[str, Exhaustion] = {}
    if projected and in_force and tenant is not None:
        history = await history_of(gateway.deps.admin, tenant, now_us)
        forecasts = projections(in_force, used, history, now_us)
    named = await gateway.deps.admin.with_names(limit_as_json(limit) for limit in shown)
    return [
        row_of(
            limit,
            now_us,
            used.get(limit.limit_id),
            forecasts.get(limit.limit_id),
            names.get("subject"),
            shows_reasons=shows_reasons,
            under=by_id.get(limit.limit_id),
        )
        for limit, names in zip(shown, named, strict=True)
    ]
