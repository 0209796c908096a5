"""The page of missed targets, the newest first, with their causes and what to do."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response

from gateway.console.access import page, visit_of
from gateway.console.csv_file import FILE_ROWS, csv_list
from gateway.console.form_errors import FormProblem
from gateway.console.pages.new_rows import MOST_NEW, NEW, new_rows, newer_than
from gateway.console.pages.requests.filters import (
    FILTER_ERRORS,
    Filters,
    TenantScope,
    checked,
    filters_of,
    tenant_scope,
)
from gateway.console.pages.requests.misses_shown import METRICS, WHAT_TO_DO, WHY, cause_words
from gateway.console.rendering import page_response
from gateway.explain.attribution import Cause
from gateway.routes.context import gateway_of
from tenants.admin.cursor import MAX_PAGE, Page
from tenants.directory.records import from_us
from tenants.people.roles import Act
from tenants.slo.slo import Missed
from tenants.types import Tier

PATH = "/console/slo/misses"
NAMES = ("tenant", "tier", "cause", "from", "to")
SHOWN = 50
FILE = f"{PATH}.csv"
COLUMNS = (
    *("request_id", "ended_at", "tenant_id", "tenant", "tier", "metric", "target_s", "actual_s", "cause"),
    "evidence",
)
"""Of the file."""


def row_of(each: Missed) -> dict[str, Any]:
    """A miss as listed: as the API shows it, in words."""
    return each.as_json() | {
        "metric_words": METRICS.get(each.metric, each.metric),
        "why": cause_words(WHY, each.cause),
        "todo": cause_words(WHAT_TO_DO, each.cause),
    }


async def _found(
    request: Request[Any, Any, Any],
    filters: Filters,
    scope: TenantScope,
    cursor: str | None = None,
    limit: int = SHOWN,
) -> Page[Missed]:
    """A page of the list. Raises `Invalid`, `NotFound`."""
    return await gateway_of(request).deps.admin.page_misses(
        tenant=scope.wanted,
        tier=filters.get("tier"),
        cause=checked("cause", filters.get("cause"), tuple(Cause)),
        since=filters.instant("from"),
        until=filters.instant("to"),
        cursor=cursor,
        limit=limit,
    )


@page(PATH, act=Act.READ_TENANT)
async def missed_targets(request: Request[Any, Any, Any]) -> Response[str]:
    filters = filters_of(request, PATH, NAMES)
    scope = await tenant_scope(request, filters.get("tenant"))
    try:
        found = await _found(request, filters, scope, filters.cursor)
    except FILTER_ERRORS as error:
        return await _shown(request, filters, scope, problem=filters.problem(error))
    return await _shown(request, filters, scope, found)


async def _shown(
    request: Request[Any, Any, Any],
    filters: Filters,
    scope: TenantScope,
    found: Page[Missed] | None = None,
    problem: FormProblem | None = None,
) -> Response[str]:
    rows = found.rows if found else []
    newest_us, is_first = rows[0].at_us if rows else None, filters.cursor is None
    return page_response(
        "requests/misses.html",
        visit_of(request),
        problem=problem,
        rows=await gateway_of(request).deps.admin.with_names(row_of(each) for each in rows),
        filters=filters,
        scope=scope,
        newer=newer_than(PATH, filters.values, newest_us, is_first=is_first) if found else "",
        next_page=filters.link(cursor=found.next_cursor) if found and found.next_cursor else "",
        file=filters.link(FILE),
        file_rows=FILE_ROWS,
        tiers=list(Tier),
        causes=list(Cause),
    )


@page(f"{PATH}/{NEW}", act=Act.READ_TENANT)
async def new_misses(request: Request[Any, Any, Any]) -> Response[str]:
    filters = filters_of(request, PATH, NAMES)
    scope = await tenant_scope(request, filters.get("tenant"))
    return new_rows(await _found(request, filters, scope, limit=MOST_NEW))


@page(FILE, act=Act.READ_TENANT)
async def misses_file(request: Request[Any, Any, Any]) -> Response[str]:
    filters = filters_of(request, PATH, NAMES)
    scope = await tenant_scope(request, filters.get("tenant"))

    async def read(cursor: str | None) -> Page[dict[str, object]]:
        found = await _found(request, filters, scope, cursor, MAX_PAGE)
        shown = (each.as_json() | {"ended_at": from_us(each.at_us).isoformat()} for each in found.rows)
        return Page(await gateway_of(request).deps.admin.with_names(shown), found.next_cursor)

    try:
        return await csv_list(
            "misses", COLUMNS, read, filters.cursor, lambda cursor: filters.link(FILE, cursor=cursor)
        )
    except FILTER_ERRORS as error:
        return await _shown(request, filters, scope, problem=filters.problem(error))


HANDLERS = [missed_targets, new_misses, misses_file]
