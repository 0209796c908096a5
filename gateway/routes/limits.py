"""Admin routes of limits: set, list, show, override for a time, remove."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, delete, get, post
from litestar.params import FromPath, FromQuery

from gateway.routes.admin_common import READ, WRITE, actor, asked, changed, listed, named
from gateway.routes.context import gateway_of, json_response
from tenants.admin.commands import LimitOverride, LimitSet
from tenants.directory.records import limit_as_json
from tenants.types import LimitMode, Meter, Window


@get(
    "/admin/v1/limits",
    opt=READ,
    summary="List limits, of one tenant or of all",
    description="With what overrides them now, and what soft and shadow ones noticed in their newest window.",
)
async def list_limits(
    request: Request[Any, Any, Any], tenant: FromQuery[str | None] = None
) -> Response[bytes]:
    views = await gateway_of(request).deps.admin.view_limits(tenant)
    return await listed(request, (each.as_json() for each in views))


@get(
    "/admin/v1/limits/{limit:str}",
    opt=READ,
    summary="Show a limit and everything it noticed",
    description="`events`: thresholds that a soft limit reached, and how many requests a shadow limit would "
    "have refused, per window, newest first.",
)
async def show_limit(request: Request[Any, Any, Any], limit: FromPath[str]) -> Response[bytes]:
    view = await gateway_of(request).deps.admin.show_limit(limit)
    return json_response(await named(request, view.as_json()))


@post(
    "/admin/v1/limits",
    status_code=201,
    opt=WRITE | {"body": LimitSet},
    summary="Set a limit",
    description="The same subject, meter, shape and tier are replaced; what was used stays used. "
    f"`meter`: {', '.join(Meter)}. `window`: {', '.join(Window)}. `mode`: {', '.join(LimitMode)}.",
)
async def set_limit(request: Request[Any, Any, Any]) -> Response[bytes]:
    wanted = await asked(request, LimitSet)
    limit = await gateway_of(request).deps.admin.set_limit(actor(request), wanted)
    return await changed(request, await named(request, limit_as_json(limit)), 201)


@post(
    "/admin/v1/limits/{limit:str}/override",
    status_code=200,
    opt=WRITE | {"body": LimitOverride},
    summary="Put another amount in force for a time",
    description="Up to `until` (an instant with a time zone), or for `for_s` seconds. A new one replaces it.",
)
async def override_limit(request: Request[Any, Any, Any], limit: FromPath[str]) -> Response[bytes]:
    wanted = await asked(request, LimitOverride)
    overridden = await gateway_of(request).deps.admin.override_limit(actor(request), limit, wanted)
    return await changed(request, await named(request, limit_as_json(overridden)))


@delete(
    "/admin/v1/limits/{limit:str}/override",
    status_code=200,
    opt=WRITE,
    summary="End an override before its time",
)
async def clear_override(request: Request[Any, Any, Any], limit: FromPath[str]) -> Response[bytes]:
    cleared = await gateway_of(request).deps.admin.clear_override(actor(request), limit)
    return await changed(request, await named(request, limit_as_json(cleared)))


@delete("/admin/v1/limits/{limit:str}", status_code=200, opt=WRITE, summary="Remove a limit")
async def remove_limit(request: Request[Any, Any, Any], limit: FromPath[str]) -> Response[bytes]:
    removed = await gateway_of(request).deps.admin.remove_limit(actor(request), limit)
    return await changed(request, await named(request, limit_as_json(removed)))


HANDLERS = [list_limits, show_limit, set_limit, override_limit, clear_override, remove_limit]
