"""The page of missed targets, the newest first, with their causes and what to do."""

from __future__ import annotations

from gateway.console.pages.requests.filters import Filters, TenantScope, checked
from gateway.console.pages.requests.misses_shown import METRICS, WHAT_TO_DO, WHY, cause_words
from gateway.console.pages.requests.record_list import Record, RecordList
from gateway.explain.attribution import Cause
from tenants.admin.admin import Admin
from tenants.admin.cursor import Page
from tenants.directory.records import from_us
from tenants.slo.slo import Missed

PATH = "/console/slo/misses"


async def read(
    admin: Admin, filters: Filters, scope: TenantScope, cursor: str | None, limit: int
) -> Page[Missed]:
    return await admin.slos.page_misses(
        tenant=scope.wanted,
        tier=filters.get("tier"),
        cause=checked("cause", filters.get("cause"), tuple(Cause)),
        since=filters.instant("from"),
        until=filters.instant("to"),
        cursor=cursor,
        limit=limit,
    )


def row_of(missed: Missed) -> Record:
    """A miss as listed: as the API shows it, in words."""
    return missed.as_json() | {
        "metric_words": METRICS.get(missed.metric, missed.metric),
        "why": cause_words(WHY, missed.cause),
        "todo": cause_words(WHAT_TO_DO, missed.cause),
    }


HANDLERS = RecordList(
    path=PATH,
    template="requests/misses.html",
    file_name="misses",
    filter_names=("tenant", "tier", "cause", "from", "to"),
    columns=(
        *("request_id", "ended_at", "tenant_id", "tenant", "tier", "metric", "target_s", "actual_s", "cause"),
        "evidence",
    ),
    read=read,
    at_us=lambda missed: missed.at_us,
    row_of=row_of,
    file_row_of=lambda missed: missed.as_json() | {"ended_at": from_us(missed.at_us).isoformat()},
    choices={"causes": list(Cause)},
).handlers()
