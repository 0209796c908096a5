"""Projects when a tenant's limits will be used up, from its hourly usage in the last four weeks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.routes.views.exhaustion_view import COUNTED_AS, counts_since_us
from tenants.admin.admin import Admin
from tenants.admin.lists.usage import MOST_HOUR_ROWS
from tenants.directory.records import Tenant, to_us
from tenants.errors import DatabaseUnavailable, Invalid
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
from tenants.types import Limit, Meter, SubjectKind
from tenants.usage.read import UsageRow
from tenants.usage.sums import AMOUNTS


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
        rows = await admin.hours_of_use(tenant.tenant_id, since_us, this_hour_us)
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
