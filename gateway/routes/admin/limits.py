"""Routes of limits: what a key reads of its own; for admins set, list, show, override for a time, remove."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from litestar import Response, delete, get, post
from litestar.params import FromPath, FromQuery

from gateway import errors
from gateway.http.asgi import Request
from gateway.http.authentication import principal_of
from gateway.routes.admin.common import (
    CHANGE,
    PAGED,
    READ,
    actor,
    changed,
    if_match,
    named,
    paged,
    tagged,
)
from gateway.routes.context import admin_of, asked, gateway_of, json_response
from gateway.routes.views.limits_view import MAX_USES_SHOWN, own_limits, uses
from tenants.admin.commands import LimitOverride, LimitSet
from tenants.admin.cursor import DEFAULT_PAGE, PAGES
from tenants.directory.records import limit_as_json
from tenants.errors import Invalid
from tenants.quota.store import IN_A_CLUSTER
from tenants.types import MAX_END_USER_CHARS, Limit, LimitMode, Meter, Window

if TYPE_CHECKING:
    from gateway.gateway import Gateway


@get(
    "/v1/limits",
    opt={"scope": "usage:read"},
    summary="The limits on this key's requests, and how much of each is used",
    description="Used, held and remaining, in units of the meter; `reset_s` until the window ends (a bucket:"
    " until it is full; null: never); `refill_per_s`: what a bucket refills at now, from `rate_per_s` up to"
    " `ceiling_per_s` by spare capacity. `binds_first`: the hard limit with the smallest share left. Beside"
    " the list it has that one's id and `projected_exhaustion`: when it is used up if use goes on as it did"
    " (`p50`, `p90`: instants, null where that is not before its window turns), and its `basis`. With"
    " `end_user` (as requests name it) those of that one. Of limits on all tenants together only whether one"
    " has no room left, and when it resets.",
)
async def read_limits(request: Request, end_user: FromQuery[str | None] = None) -> Response[bytes]:
    user = end_user or ""
    if len(user) > MAX_END_USER_CHARS:
        raise errors.bad_request(
            f"Invalid 'end_user': the most is {MAX_END_USER_CHARS} characters.", "end_user"
        )
    return json_response(await own_limits(gateway_of(request), principal_of(request), user))


@get(
    "/admin/v1/limits",
    opt=PAGED,
    summary="List limits, of one tenant or of all",
    description="With what overrides them now, how much is used (`usage`; null: not known at the moment),"
    " which one of a tenant binds first, and what soft and shadow ones noticed in their newest window."
    f" `tenant`: those of one; `end_user`: the use of a tenant's default by that one. {PAGES}",
)
async def list_limits(
    request: Request,
    tenant: FromQuery[str | None] = None,
    end_user: FromQuery[str | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
) -> Response[bytes]:
    gateway = gateway_of(request)
    page = await gateway.deps.admin.limits.page(tenant, cursor=cursor, limit=limit)
    in_force = [row.limit.at(row.now_s) for row in page.rows]
    is_whole = cursor is None and page.next_cursor is None
    beside = [] if is_whole else _beside(gateway, in_force, page.rows[0].now_s if page.rows else 0.0)
    used = await uses(gateway, in_force, end_user or "", beside=beside)
    return await paged(request, page, lambda row: row.as_json() | _usage(used, row.limit))


def _beside(gateway: Gateway, shown: Sequence[Limit], now_s: float) -> list[Limit]:
    """The tenants' other limits: one of them may bind first."""
    ids = {limit.limit_id for limit in shown}
    return [
        limit
        for tenant_id in sorted({limit.tenant_id for limit in shown})
        for limit in gateway.deps.directory.limits(now_s, tenant_id)
        if limit.limit_id not in ids
    ][:MAX_USES_SHOWN]


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
    request: Request, limit: FromPath[str], end_user: FromQuery[str | None] = None
) -> Response[bytes]:
    gateway = gateway_of(request)
    view = await gateway.deps.admin.limits.show(limit)
    shown = view.limit.at(view.now_s)
    beside = _beside(gateway, [shown], view.now_s)
    used = await uses(gateway, [shown], end_user or "", beside=beside)
    answer = json_response(await named(request, view.as_json() | _usage(used, shown)))
    return tagged(answer, limit_as_json(view.limit))


@post(
    "/admin/v1/limits",
    status_code=201,
    opt=CHANGE | {"body": LimitSet},
    summary="Set a limit",
    description="Its subject: `platform` (all tenants together), `tenant`, or of a tenant one `project`,"
    " `key` or `end_user`, or `each_end_user`. `tier`, `model` and `above_tokens` (prompt and `max_tokens`"
    " together) narrow it. The same subject, meter, shape, tier, model and size are replaced; what was used"
    " stays used. A first limit begins at zero: it counts what is under way and what comes, not what had"
    " ended before (`counts_since`). It is in force in every gateway when this is answered; `not_in_force_on`"
    " names those that have not confirmed it within 5 seconds."
    f" `ceiling_per_s`: what a hard rate of tokens in tier batch refills at while capacity is spare."
    f" `meter`: {', '.join(Meter)}. `window`: {', '.join(Window)}. `mode`: {', '.join(LimitMode)}.",
)
async def set_limit(request: Request) -> Response[bytes]:
    wanted = await asked(request, LimitSet)
    if wanted.platform and not gateway_of(request).deps.quota_store.keeps_platform_limits:
        raise Invalid("platform", IN_A_CLUSTER)
    limit = await admin_of(request).limits.set(actor(request), wanted, if_match=if_match(request))
    return await _changed(request, limit, 201)


@post(
    "/admin/v1/limits/{limit:str}/override",
    status_code=200,
    opt=CHANGE | {"body": LimitOverride},
    summary="Put another amount in force for a time",
    description="Up to `until` (an instant with a time zone), or for `for_s` seconds. A new one replaces it.",
)
async def override_limit(request: Request, limit: FromPath[str]) -> Response[bytes]:
    wanted = await asked(request, LimitOverride)
    overridden = await admin_of(request).limits.override(
        actor(request), limit, wanted, if_match=if_match(request)
    )
    return await _changed(request, overridden)


@delete(
    "/admin/v1/limits/{limit:str}/override",
    status_code=200,
    opt=CHANGE,
    summary="End an override before its time",
)
async def clear_override(request: Request, limit: FromPath[str]) -> Response[bytes]:
    cleared = await admin_of(request).limits.clear_override(actor(request), limit, if_match=if_match(request))
    return await _changed(request, cleared)


@delete("/admin/v1/limits/{limit:str}", status_code=200, opt=CHANGE, summary="Remove a limit")
async def remove_limit(request: Request, limit: FromPath[str]) -> Response[bytes]:
    removed = await admin_of(request).limits.remove(actor(request), limit, if_match=if_match(request))
    return await changed(request, await named(request, limit_as_json(removed)))


async def _changed(request: Request, limit: Limit, status: int = 200) -> Response[bytes]:
    stored = limit_as_json(limit)
    return await changed(request, await named(request, stored), status, stored=stored)


HANDLERS = [read_limits, list_limits, show_limit, set_limit, override_limit, clear_override, remove_limit]
