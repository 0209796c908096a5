"""The page of refused requests: which limit refused each, what was wanted and available, and the way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    filters_of,
    tenant_scope,
)
from gateway.console.pages.requests.ways_out import way_out
from gateway.console.rendering import page_response
from gateway.routes.context import gateway_of
from gateway.routes.refusals import request_id_or_none
from tenants.admin.cursor import MAX_PAGE, Page
from tenants.admin.lists.counts import RefusalCountQuery
from tenants.admin.lists.refusals import RefusalQuery
from tenants.people.roles import Act
from tenants.refusals.refusal import RefusedRequest
from tenants.types import Tier

PATH = "/console/refusals"
NAMES = ("request_id", "tenant", "project", "key", "model", "tier", "code", "limit_id", "from", "to")
SHOWN = 50
FILE = f"{PATH}.csv"
COLUMNS = (
    *("request_id", "at", "tenant_id", "tenant", "project_id", "project", "key_id", "key_name", "model"),
    *("tier", "code", "limit_id", "of_platform", "wanted", "available", "retry_after_s", "way_out"),
)
"""Of the file."""
MOST_CODES = 1_000


def query_of(filters: Filters, scope: TenantScope) -> RefusalQuery:
    """Which of them. A member's tenant is not a filter, but the view."""
    return RefusalQuery(
        request_id=request_id_or_none(filters.get("request_id")),
        tenant=None if scope.of_tenant else scope.wanted,
        project=filters.get("project"),
        key=filters.get("key"),
        model=filters.get("model"),
        tier=filters.get("tier"),
        code=filters.get("code"),
        limit_id=filters.get("limit_id"),
        since=filters.instant("from"),
        until=filters.instant("to"),
    )


def counts_of(filters: Filters, scope: TenantScope) -> RefusalCountQuery:
    """The exact numbers by code, of the tenant and the time; other filters do not count."""
    return RefusalCountQuery(
        window="total",
        group_by="code",
        tenant=scope.wanted,
        since=filters.instant("from"),
        until=filters.instant("to"),
    )


def row_of(each: RefusedRequest) -> dict[str, Any]:
    """A refusal as listed: as the API shows it, with the instant in microseconds and the way out."""
    return each.as_json() | {"at_us": each.at_us, "way_out": way_out(each.code)}


async def _found(
    request: Request[Any, Any, Any],
    filters: Filters,
    scope: TenantScope,
    cursor: str | None = None,
    limit: int = SHOWN,
) -> Page[RefusedRequest]:
    """A page of the list. Raises `Invalid`, `NotFound`."""
    return await gateway_of(request).deps.admin.read_refusals(
        query_of(filters, scope), cursor=cursor, limit=limit, of_tenant=scope.of_tenant
    )


@page(PATH, act=Act.READ_TENANT)
async def refused_requests(request: Request[Any, Any, Any]) -> Response[str]:
    filters = filters_of(request, PATH, NAMES)
    scope = await tenant_scope(request, filters.get("tenant"))
    try:
        found = await _found(request, filters, scope, filters.cursor)
        counts = await gateway_of(request).deps.admin.count_refusals(
            counts_of(filters, scope), limit=MOST_CODES
        )
    except FILTER_ERRORS as error:
        return await _shown(request, filters, scope, problem=filters.problem(error))
    return await _shown(request, filters, scope, found, counts.rows)


async def _shown(
    request: Request[Any, Any, Any],
    filters: Filters,
    scope: TenantScope,
    found: Page[RefusedRequest] | None = None,
    counts: Sequence[Mapping[str, Any]] = (),
    problem: FormProblem | None = None,
) -> Response[str]:
    rows = found.rows if found else []
    newest_us, is_first = rows[0].at_us if rows else None, filters.cursor is None
    return page_response(
        "requests/refused.html",
        visit_of(request),
        problem=problem,
        rows=await gateway_of(request).deps.admin.with_names(row_of(each) for each in rows),
        counts=sorted(counts, key=lambda each: (-each["count"], each["code"])),
        filters=filters,
        scope=scope,
        newer=newer_than(PATH, filters.values, newest_us, is_first=is_first) if found else "",
        next_page=filters.link(cursor=found.next_cursor) if found and found.next_cursor else "",
        file=filters.link(FILE),
        file_rows=FILE_ROWS,
        tiers=list(Tier),
    )


@page(f"{PATH}/{NEW}", act=Act.READ_TENANT)
async def new_refusals(request: Request[Any, Any, Any]) -> Response[str]:
    filters = filters_of(request, PATH, NAMES)
    scope = await tenant_scope(request, filters.get("tenant"))
    return new_rows(await _found(request, filters, scope, limit=MOST_NEW))


@page(FILE, act=Act.READ_TENANT)
async def refusals_file(request: Request[Any, Any, Any]) -> Response[str]:
    filters = filters_of(request, PATH, NAMES)
    scope = await tenant_scope(request, filters.get("tenant"))

    async def read(cursor: str | None) -> Page[dict[str, object]]:
        found = await _found(request, filters, scope, cursor, MAX_PAGE)
        named = await gateway_of(request).deps.admin.with_names(row_of(each) for each in found.rows)
        return Page(named, found.next_cursor)

    try:
        return await csv_list(
            "refusals", COLUMNS, read, filters.cursor, lambda cursor: filters.link(FILE, cursor=cursor)
        )
    except FILTER_ERRORS as error:
        return await _shown(request, filters, scope, problem=filters.problem(error))


HANDLERS = [refused_requests, new_refusals, refusals_file]
