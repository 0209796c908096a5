"""Route of a tenant's own usage: what was charged by window and groups."""

from __future__ import annotations

from typing import Annotated

from litestar import Response, get
from litestar.params import FromQuery, QueryParameter

from gateway.http.asgi import Request
from gateway.http.authentication import principal_of
from gateway.routes.context import admin_of, json_response
from gateway.routes.openapi_fields import between, one_of
from gateway.routes.views.usage_view import AMOUNTS_SHOWN, TIMES, shown_usage
from tenants.admin.cursor import DEFAULT_PAGE, MAX_PAGE
from tenants.admin.lists.usage import UsageAsked
from tenants.types import Tier
from tenants.usage.query import GROUPS, WINDOWS, check_groups

OWN_GROUPS = tuple(group for group in GROUPS if group != "tenant")


@get(
    "/v1/usage",
    opt={
        "scope": "usage:read",
        "parameters": {"limit": between(1, MAX_PAGE), "window": one_of(WINDOWS), "tier": one_of(Tier)},
    },
    summary="This tenant's usage by window and groups, as it is charged",
    description=f"`group_by`: {', '.join(OWN_GROUPS)}, `label:<name>`, with commas between them. Filters:"
    " `project`, `key` (names or ids), `model`, `tier`, `outcome`, `label` (`team=search`, several times for"
    f" several). {TIMES} {AMOUNTS_SHOWN}",
)
async def own_usage(
    request: Request,
    from_: Annotated[str | None, QueryParameter(name="from")] = None,
    to: FromQuery[str | None] = None,
    window: FromQuery[str] = "total",
    group_by: FromQuery[str] = "",
    time_zone: FromQuery[str] = "UTC",
    project: FromQuery[str | None] = None,
    key: FromQuery[str | None] = None,
    model: FromQuery[str | None] = None,
    tier: FromQuery[str | None] = None,
    outcome: FromQuery[str | None] = None,
    label: FromQuery[list[str] | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
) -> Response[bytes]:
    asked = UsageAsked(
        from_=from_,
        to=to,
        window=window,
        group_by=group_by,
        time_zone=time_zone,
        tenant=principal_of(request).tenant_id,
        project=project,
        key=key,
        model=model,
        tier=tier,
        outcome=outcome,
        labels=tuple(label or ()),
    )
    check_groups(asked.groups, OWN_GROUPS)
    return json_response(await shown_usage(admin_of(request), asked, cursor, limit))


HANDLERS = [own_usage]
