"""Routes of limits: what a key reads of its own; for admins set, list, show, override for a time, remove."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, delete, get, post
from litestar.params import FromPath, FromQuery

from gateway import errors
from gateway.http.authentication import principal_of
from gateway.routes.admin_common import READ, WRITE, actor, asked, changed, listed, named
from gateway.routes.context import gateway_of, json_response
from gateway.routes.views.limits_view import own_limits, uses
from tenants.admin.commands import LimitOverride, LimitSet
from tenants.directory.records import limit_as_json
from tenants.errors import Invalid
from tenants.quota.store import IN_A_CLUSTER
from tenants.types import MAX_END_USER_CHARS, Limit, LimitMode, Meter, Window


@get(
    "/v1/limits",
    opt={"scope": "usage:read"},
    summary="The limits on this key's requests, and how much of each is used",
    description="Used, held and remaining, in units of the meter; `reset_s` until the window ends (a bucket:"
    " until it is full; null: never). `binds_first`: the hard limit with the smallest share left. With"
    " `end_user` (as requests name it) those of that one. Of limits on all tenants together only whether one"
    " has no room left, and when it resets.",
)
async def read_limits(
    request: Request[Any, Any, Any], end_user: FromQuery[str | None] = None
) -> Response[bytes]:
    user = end_user or ""
    if len(user) > MAX_END_USER_CHARS:
        raise errors.bad_request(
            f"Invalid 'end_user': the most is {MAX_END_USER_CHARS} characters.", "end_user"
        )
    return json_response(await own_limits(gateway_of(request), principal_of(request), user))


@get(
    "/admin/v1/limits",
    opt=READ,
    summary="List limits, of one tenant or of all",
    description="With what overrides them now, how much is used (`usage`; null: not known at the moment),"
    " which one of a tenant binds first, and what soft and shadow ones noticed in their newest window."
    " `tenant`: those of one; `end_user`: the use of a tenant's default by that one.",
)
async def list_limits(
    request: Request[Any, Any, Any],
    tenant: FromQuery[str | None] = None,
    end_user: FromQuery[str | None] = None,
) -> Response[bytes]:
    gateway = gateway_of(request)
    views = await gateway.deps.admin.view_limits(tenant)
    in_force = [each.limit.at(each.now_s) for each in views]
    used = await uses(gateway, in_force, end_user or "")
    return await listed(request, (each.as_json() | _usage(used, each.limit) for each in views))


def _usage(used: dict[str, dict[str, Any]], limit: Limit) -> dict[str, Any]:
    return {"usage": used.get(limit.limit_id)}


@get(
    "/admin/v1/limits/{limit:str}",
    opt=READ,
    summary="Show a limit and everything it noticed",
    description="`usage` as in the list. `events`: thresholds that a soft limit reached, and how many"
    " requests a shadow limit would have refused, per window, newest first.",
)
async def show_limit(
    request: Request[Any, Any, Any], limit: FromPath[str], end_user: FromQuery[str | None] = None
) -> Response[bytes]:
    gateway = gateway_of(request)
    view = await gateway.deps.admin.show_limit(limit)
    shown = view.limit.at(view.now_s)
    others = [
        each
        for each in gateway.deps.directory.limits(view.now_s, shown.tenant_id)
        if each.limit_id != shown.limit_id
    ]
    used = await uses(gateway, [shown], end_user or "", beside=others)
    return json_response(await named(request, view.as_json() | _usage(used, shown)))


@post(
    "/admin/v1/limits",
    status_code=201,
    opt=WRITE | {"body": LimitSet},
    summary="Set a limit",
    description="Its subject: `platform` (all tenants together), `tenant`, or of a tenant one `project`,"
    " `key` or `end_user`, or `each_end_user`. `tier`, `model` and `above_tokens` (prompt and `max_tokens`"
    " together) narrow it. The same subject, meter, shape, tier, model and size are replaced; what was used"
    " stays used."
    f" `meter`: {', '.join(Meter)}. `window`: {', '.join(Window)}. `mode`: {', '.join(LimitMode)}.",
)
async def set_limit(request: Request[Any, Any, Any]) -> Response[bytes]:
    wanted = await asked(request, LimitSet)
    if wanted.platform and not gateway_of(request).deps.quota_store.keeps_platform_limits:
        raise Invalid("platform", IN_A_CLUSTER)
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


HANDLERS = [read_limits, list_limits, show_limit, set_limit, override_limit, clear_override, remove_limit]
