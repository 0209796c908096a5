"""The page of refused requests: which limit refused each, what was wanted and available, and the way out."""

from __future__ import annotations

from gateway.console.pages.requests.filters import Filters, TenantScope
from gateway.console.pages.requests.record_list import Record, RecordList
from gateway.console.pages.requests.ways_out import way_out
from gateway.routes.refusals import request_id_or_none
from tenants.admin.admin import Admin
from tenants.admin.cursor import Page
from tenants.admin.lists.counts import RefusalCountQuery
from tenants.admin.lists.refusals import RefusalQuery
from tenants.counts.refusal_store import RefusedRequest

MOST_CODES = 1_000


async def read(
    admin: Admin, filters: Filters, scope: TenantScope, cursor: str | None, limit: int
) -> Page[RefusedRequest]:
    """A page of the list. A member's tenant is not a filter, but the view. Raises `Invalid`, `NotFound`."""
    query = RefusalQuery(
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
    return await admin.refusals.read(query, cursor=cursor, limit=limit, of_tenant=scope.of_tenant)


async def counts_by_code(admin: Admin, filters: Filters, scope: TenantScope) -> Record:
    """The exact numbers by code, of the tenant and the time; other filters do not count."""
    query = RefusalCountQuery(
        window="total",
        group_by="code",
        tenant=scope.wanted,
        since=filters.instant("from"),
        until=filters.instant("to"),
    )
    counts = await admin.counts.refusals(query, limit=MOST_CODES)
    return {"counts": sorted(counts.rows, key=lambda count: (-count["count"], count["code"]))}


def row_of(refused: RefusedRequest) -> Record:
    """A refusal as listed: as the API shows it, with the instant in microseconds and the way out."""
    return refused.as_json() | {"at_us": refused.at_us, "way_out": way_out(refused.code)}


HANDLERS = RecordList(
    path="/console/refusals",
    template="requests/refused.html",
    file_name="refusals",
    filter_names=(
        "request_id",
        "tenant",
        "project",
        "key",
        "model",
        "tier",
        "code",
        "limit_id",
        "from",
        "to",
    ),
    columns=(
        *("request_id", "at", "tenant_id", "tenant", "project_id", "project", "key_id", "key_name", "model"),
        *("tier", "code", "limit_id", "of_platform", "wanted", "available", "retry_after_s", "way_out"),
    ),
    read=read,
    at_us=lambda refused: refused.at_us,
    row_of=row_of,
    file_row_of=row_of,
    choices={"counts": []},
    summary=counts_by_code,
).handlers()
