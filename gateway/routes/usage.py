"""Route of a tenant's own usage: what was charged by window and groups."""

from __future__ import annotations

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromQuery
from msgspec.structs import replace

from gateway.http.asgi import Request
from gateway.http.authentication import principal_of
from gateway.routes.context import admin_of, json_response
from gateway.routes.views.usage_view import AMOUNTS_SHOWN, FILTERS, TIMES, by, shown_usage
from tenants.admin.cursor import DEFAULT_PAGE
from tenants.admin.lists.usage import UsageAsked
from tenants.usage.query import GROUPS, check_groups

OWN_GROUPS = tuple(group for group in GROUPS if group != "tenant")


@get(
    "/v1/usage",
    dependencies=FILTERS,
    opt={"scope": "usage:read", "parameters": by(OWN_GROUPS)},
    summary="This tenant's usage by window and groups, as it is charged",
    description=f"`group_by`: {', '.join(OWN_GROUPS)}, `label:<name>`, with commas between them. Filters:"
    " `project`, `key` (names or ids), `model`, `tier`, `outcome`, `label` (`team=search`, several times for"
    f" several). {TIMES} {AMOUNTS_SHOWN}",
)
async def own_usage(
    request: Request,
    filters: NamedDependency[UsageAsked],
    window: FromQuery[str] = "total",
    group_by: FromQuery[str] = "",
    cursor: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
) -> Response[bytes]:
    tenant_id = principal_of(request).tenant_id
    asked = replace(filters, tenant=tenant_id, window=window, group_by=group_by)
    check_groups(asked.groups, OWN_GROUPS)
    return json_response(await shown_usage(admin_of(request), asked, cursor, limit))


HANDLERS = [own_usage]
