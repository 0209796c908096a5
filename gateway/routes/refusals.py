"""A tenant's refused requests, and what operators' routes share with it."""

from __future__ import annotations

from typing import Annotated

from litestar import Response, get
from litestar.params import FromQuery, QueryParameter

from gateway.domain.ids import request_id_of
from gateway.http.asgi import Request
from gateway.http.authentication import principal_of
from gateway.routes.context import admin_of, json_response
from gateway.routes.openapi_fields import between, one_of
from tenants.admin.cursor import DEFAULT_PAGE, MAX_PAGE
from tenants.admin.lists.refusals import RefusalQuery
from tenants.counts.refusal_store import DAY_S, KEPT_ROWS_S
from tenants.types import Tier

Since = Annotated[str | None, QueryParameter(name="from")]
Until = Annotated[str | None, QueryParameter(name="to")]
PAGES = f"At most `limit` rows, up to {MAX_PAGE}; `next_cursor` gives the next page as `cursor`, same filter."
BOUNDS = {"limit": between(1, MAX_PAGE)}
LISTED = (
    "The newest first. Filters: `request_id` (or the completion's id), `project`, `key`, `model` (as it was"
    " asked for), `tier`, `code`, `limit_id`, `from` and `to` (instants with a time zone; the second is"
    f" exclusive). {PAGES} Of many refusals of one kind in a minute only the first few are kept, for"
    f" {KEPT_ROWS_S // DAY_S} days."
)


def request_id_or_none(request_id: str | None) -> str | None:
    """Accepts the completion's id, too."""
    return None if request_id is None else request_id_of(request_id)


async def shown_refusals(
    request: Request, query: RefusalQuery, cursor: str | None, limit: int, *, of_tenant: str | None = None
) -> Response[bytes]:
    """`of_tenant`: as this tenant may see its own."""
    admin = admin_of(request)
    page = await admin.refusals.read(query, cursor=cursor, limit=limit, of_tenant=of_tenant)
    rows = await admin.with_names(row.as_json() for row in page.rows)
    return json_response({"object": "list", "data": rows, "next_cursor": page.next_cursor})


@get(
    "/v1/refusals",
    opt={"scope": "usage:read", "parameters": BOUNDS | {"tier": one_of(Tier)}},
    summary="List this tenant's refused requests: by which limit, what was wanted and available",
    description=f"{LISTED} Of a limit on all tenants together (`of_platform`) no numbers are shown.",
)
async def list_own_refusals(
    request: Request,
    request_id: FromQuery[str | None] = None,
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
        project=project,
        key=key,
        model=model,
        tier=tier,
        code=code,
        limit_id=limit_id,
        since=since,
        until=until,
    )
    return await shown_refusals(request, query, cursor, limit, of_tenant=principal_of(request).tenant_id)


HANDLERS = [list_own_refusals]
