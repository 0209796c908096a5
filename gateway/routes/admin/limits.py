"""Routes of limits beside their resource's: a key's own, and one limit with all that it noticed."""

from __future__ import annotations

from litestar import Response, get
from litestar.params import FromPath, FromQuery

from gateway import errors
from gateway.http.asgi import Request
from gateway.http.authentication import principal_of
from gateway.routes.admin.common import READ, named, tagged
from gateway.routes.context import gateway_of, json_response
from gateway.routes.views.limits_view import own_limits, with_uses
from tenants.nouns.limit import limit_as_json
from tenants.types import MAX_END_USER_CHARS


@get(
    "/v1/limits",
    opt={"scope": "usage:read"},
    summary="The limits on this key's requests, and how much of each is used",
    description="Used, held and remaining, in units of the meter; `reset_s` until the window ends (a bucket:"
    " until it is full; null: never); `refill_per_s`: what a bucket refills at now, from its rate up to its"
    " ceiling by spare capacity. `binds_first`: the hard limit with the smallest share left. Beside"
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
    [shown] = await with_uses(gateway, [view], end_user or "")
    return tagged(json_response(await named(request, shown)), limit_as_json(view.limit))


HANDLERS = [read_limits, show_limit]
