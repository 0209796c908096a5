"""Admin routes of refused requests: which, and how many."""

from __future__ import annotations

from litestar import Response, get
from litestar.params import FromQuery

from gateway.http.asgi import Request
from gateway.routes.admin.common import READ
from gateway.routes.context import admin_of, json_response
from gateway.routes.openapi_fields import groups, one_of
from gateway.routes.refusals import BOUNDS, LISTED, PAGES, Since, Until, request_id_or_none, shown_refusals
from tenants.admin.cursor import DEFAULT_PAGE
from tenants.admin.lists.counts import (
    ALL_REFUSAL_GROUPS,
    LONGEST_S,
    REFUSAL_GROUPS,
    WINDOWS_S,
    RefusalCountQuery,
)
from tenants.admin.lists.refusals import RefusalQuery
from tenants.counts.refusal_store import DAY_S, KEPT_COUNTS_S, KEPT_MINUTES_S


@get(
    "/admin/v1/refusals",
    opt=READ | {"parameters": BOUNDS},
    summary="List refused requests: by which limit, what was wanted and available",
    description=f"{LISTED} `tenant`: name or id. Requests without a known key have no tenant.",
)
async def list_refusals(
    request: Request,
    request_id: FromQuery[str | None] = None,
    tenant: FromQuery[str | None] = None,
    project: FromQuery[str | None] = None,
    key: FromQuery[str | None] = None,
    model: FromQuery[str | None] = None,
    tier: FromQuery[str | None] = None,
    code: FromQuery[str | None] = None,
    limit_id: FromQuery[str | None] = None,
    since: Since = None,
    until: Until = None,
    cursor: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
) -> Response[bytes]:
    query = RefusalQuery(
        request_id=request_id_or_none(request_id),
        tenant=tenant,
        project=project,
        key=key,
        model=model,
        tier=tier,
        code=code,
        limit_id=limit_id,
        since=since,
        until=until,
    )
    return await shown_refusals(request, query, cursor, limit)


@get(
    "/admin/v1/refusals/counts",
    opt=READ | {"parameters": BOUNDS | {"window": one_of(WINDOWS_S), "group_by": groups(REFUSAL_GROUPS)}},
    summary="Count refused requests, exactly",
    description=f"By `window` (minute: at most {LONGEST_S['minute'] // DAY_S} day at a time, hour: at most"
    f" {LONGEST_S['hour'] // DAY_S}; total: the whole time at once, without `start`) and `group_by` (some of"
    f" {ALL_REFUSAL_GROUPS}; all of them where it is left out, none where it is empty), the oldest first."
    f" Filters: `tenant`, `code`, `limit_id`, `from`, `to`; without `from` the last hour, or day. {PAGES}"
    " Minutes are kept for"
    f" {KEPT_MINUTES_S // DAY_S} days, hours for {KEPT_COUNTS_S // DAY_S}. The last second is not in yet.",
)
async def count_refusals(
    request: Request,
    window: FromQuery[str] = "hour",
    group_by: FromQuery[str] = ALL_REFUSAL_GROUPS,
    tenant: FromQuery[str | None] = None,
    code: FromQuery[str | None] = None,
    limit_id: FromQuery[str | None] = None,
    since: Since = None,
    until: Until = None,
    cursor: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
) -> Response[bytes]:
    query = RefusalCountQuery(
        window=window,
        group_by=group_by,
        tenant=tenant,
        code=code,
        limit_id=limit_id,
        since=since,
        until=until,
    )
    admin = admin_of(request)
    page = await admin.counts.refusals(query, cursor=cursor, limit=limit)
    rows = await admin.with_names(page.rows)
    return json_response({"object": "list", "data": rows, "next_cursor": page.next_cursor})


HANDLERS = [list_refusals, count_refusals]
