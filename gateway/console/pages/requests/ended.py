"""The page of ended requests, the newest first, and how many have ended since it was loaded."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response

from gateway.console.access import page, visit_of
from gateway.console.csv_file import FILE_ROWS, csv_list
from gateway.console.form_errors import FormProblem
from gateway.console.formats import exact_dollars
from gateway.console.pages.new_rows import MOST_NEW, NEW, new_rows, newer_than
from gateway.console.pages.requests.filters import (
    FILTER_ERRORS,
    Filters,
    TenantScope,
    checked,
    filters_of,
    tenant_scope,
)
from gateway.console.rendering import page_response
from gateway.domain.outcomes import RequestOutcome
from gateway.explain.attribution import Cause
from gateway.explain.explanation import steps_of
from gateway.routes.context import gateway_of
from tenants.admin.cursor import MAX_PAGE, Page
from tenants.admin.lists.requests import RequestQuery, SettledRequest
from tenants.people.roles import Act
from tenants.types import Tier

PATH = "/console/requests"
NAMES = ("tenant", "project", "key", "model", "tier", "outcome", "cause", "from", "to")
SHOWN = 50
FILE = f"{PATH}.csv"
COLUMNS = (
    *("id", "ended_at", "outcome", "tenant_id", "tenant", "project_id", "project", "key_id", "key_name"),
    *("model", "tier", "input_tokens", "output_tokens", "cost_nanousd", "charged_usd", "gpu_ms"),
    *("dispatched_s", "first_token_s", "ended_s", "misses", "labels"),
)
"""Of the file."""


def query_of(filters: Filters, scope: TenantScope) -> RequestQuery:
    """What is asked. Raises `Invalid`."""
    return RequestQuery(
        tenant=scope.wanted,
        project=filters.get("project"),
        key=filters.get("key"),
        model=filters.get("model"),
        tier=filters.get("tier"),
        outcome=checked("outcome", filters.get("outcome"), tuple(RequestOutcome)),
        cause=checked("cause", filters.get("cause"), tuple(Cause)),
        since=filters.instant("from"),
        until=filters.instant("to"),
    )


def row_of(each: SettledRequest) -> dict[str, Any]:
    """A request as listed: as the API shows it, with the instant in microseconds."""
    return each.as_json() | steps_of(each.packed) | {"ended_us": each.ended_us}


def file_row_of(each: SettledRequest) -> dict[str, Any]:
    """A request as a row of the file: exact."""
    missed = [f"{metric}: {cause}" for metric, cause in each.misses]
    return row_of(each) | {"misses": ", ".join(missed), "charged_usd": exact_dollars(each.cost_nanousd)}


async def _found(
    request: Request[Any, Any, Any],
    filters: Filters,
    scope: TenantScope,
    cursor: str | None = None,
    limit: int = SHOWN,
) -> Page[SettledRequest]:
    """A page of the list. Raises `Invalid`, `NotFound`."""
    admin = gateway_of(request).deps.admin
    return await admin.page_requests(query_of(filters, scope), cursor=cursor, limit=limit)


@page(PATH, act=Act.READ_TENANT)
async def ended_requests(request: Request[Any, Any, Any]) -> Response[str]:
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
    found: Page[SettledRequest] | None = None,
    problem: FormProblem | None = None,
) -> Response[str]:
    rows = found.rows if found else []
    newest_us, is_first = rows[0].ended_us if rows else None, filters.cursor is None
    return page_response(
        "requests/ended.html",
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
        outcomes=list(RequestOutcome),
        causes=list(Cause),
    )


@page(f"{PATH}/{NEW}", act=Act.READ_TENANT)
async def new_requests(request: Request[Any, Any, Any]) -> Response[str]:
    filters = filters_of(request, PATH, NAMES)
    scope = await tenant_scope(request, filters.get("tenant"))
    return new_rows(await _found(request, filters, scope, limit=MOST_NEW))


@page(FILE, act=Act.READ_TENANT)
async def requests_file(request: Request[Any, Any, Any]) -> Response[str]:
    filters = filters_of(request, PATH, NAMES)
    scope = await tenant_scope(request, filters.get("tenant"))

    async def read(cursor: str | None) -> Page[dict[str, object]]:
        found = await _found(request, filters, scope, cursor, MAX_PAGE)
        named = await gateway_of(request).deps.admin.with_names(file_row_of(each) for each in found.rows)
        return Page(named, found.next_cursor)

    try:
        return await csv_list(
            "requests", COLUMNS, read, filters.cursor, lambda cursor: filters.link(FILE, cursor=cursor)
        )
    except FILTER_ERRORS as error:
        return await _shown(request, filters, scope, problem=filters.problem(error))


HANDLERS = [ended_requests, new_requests, requests_file]
