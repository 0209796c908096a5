"""Admin routes of usage: what was charged by window and groups, and whether its sums are the ledger's."""

from __future__ import annotations

from typing import Annotated

from litestar import Response, get, post
from litestar.params import FromQuery, QueryParameter

from gateway.http.asgi import Request
from gateway.routes.admin.common import READ, WRITE, actor
from gateway.routes.context import admin_of, gateway_of, json_response
from gateway.routes.openapi_fields import between, one_of
from gateway.routes.views.usage_view import AMOUNTS_SHOWN, TIMES, shown_usage
from tenants.admin.cursor import DEFAULT_PAGE, MAX_PAGE
from tenants.admin.lists.usage import UsageAsked
from tenants.types import Tier
from tenants.usage.query import GROUPS, WINDOWS


@get(
    "/admin/v1/usage",
    opt=READ
    | {"parameters": {"limit": between(1, MAX_PAGE), "window": one_of(WINDOWS), "tier": one_of(Tier)}},
    summary="Usage of all tenants by window and groups, as the ledger has it",
    description=f"`group_by`: {', '.join(GROUPS)}, `label:<name>`, with commas between them. Filters:"
    " `tenant`, `project`, `key` (names or ids), `model`, `tier`, `outcome`, `label` (`team=search`, several"
    f" times for several). {TIMES} {AMOUNTS_SHOWN}",
)
async def show_usage(
    request: Request,
    from_: Annotated[str | None, QueryParameter(name="from")] = None,
    to: FromQuery[str | None] = None,
    window: FromQuery[str] = "total",
    group_by: FromQuery[str] = "",
    time_zone: FromQuery[str] = "UTC",
    tenant: FromQuery[str | None] = None,
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
        tenant=tenant,
        project=project,
        key=key,
        model=model,
        tier=tier,
        outcome=outcome,
        labels=tuple(label or ()),
    )
    return json_response(await shown_usage(admin_of(request), asked, cursor, limit))


@post(
    "/admin/v1/usage/verify",
    status_code=200,
    opt=READ,
    summary="Are the sums of usage what the ledger says?",
    description="Of all that is folded so far. `POST /admin/v1/ledger/verify` asks the same besides.",
)
async def verify_usage(request: Request) -> Response[bytes]:
    problems = (await gateway_of(request).usage_check.run()).problems
    return json_response({"ok": not problems, "problems": problems})


@post(
    "/admin/v1/usage/rebuild",
    status_code=200,
    opt=WRITE,
    summary="Make the sums of usage what the ledger says",
    description="While all goes on. `corrected`: how many sums were not. Where nothing is wrong, nothing"
    " changes.",
)
async def rebuild_usage(request: Request) -> Response[bytes]:
    corrected = await admin_of(request).rebuild_usage(actor(request))
    return json_response({"corrected": corrected})


HANDLERS = [show_usage, verify_usage, rebuild_usage]
