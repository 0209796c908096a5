"""Admin routes: the running server: status, dispatch log, forecasts."""

from __future__ import annotations

from litestar import Response, get
from litestar.params import FromQuery

from gateway import errors
from gateway.http.asgi import Request
from gateway.routes.admin.common import READ
from gateway.routes.context import gateway_of, json_response
from gateway.routes.health import readiness_of
from gateway.routes.openapi_fields import between
from gateway.routes.views.policy_view import tenant_names
from gateway.routes.views.status_view import forecasts_of, status_of

MAX_LOG_PAGE = 5_000


@get(
    "/admin/v1/status",
    opt=READ,
    summary="Queue, tenants, engines and refusals, now",
    description="Each tenant's `tiers`: what waits and runs, its part of the tier's service of about the last"
    " minute (`share`) against the weighted max-min one (`fair_share`), and of its last requests the waits"
    " that they were told and had. `readiness` is what `/readyz` says. `control`, of each model: where its"
    " knobs stand, or would by its advice, and its last moves with their reasons. `active`: only tenants with"
    " something that waits, runs or was served, without their limits and without `readiness`.",
)
async def status(request: Request, active: FromQuery[bool] = False) -> Response[bytes]:
    gateway = gateway_of(request)
    shown = await status_of(gateway, active_only=active)
    return json_response(shown if active else shown | {"readiness": await readiness_of(gateway)})


@get(
    "/admin/v1/dispatch-log",
    opt=READ | {"parameters": {"since": between(0), "limit": between(1, MAX_LOG_PAGE)}},
    summary="The flow controller's events",
    description="Arrivals, dispatches (with the counters of all who waited), corrections of charges by"
    " the length that an engine foresees, and settlements from index `since` on, at most `limit`."
    " `first_index` is the oldest that is kept; `tenants` has names by id.",
)
async def dispatch_log(
    request: Request, since: FromQuery[int] = 0, limit: FromQuery[int] = 1000
) -> Response[bytes]:
    if since < 0:
        raise errors.bad_request(f"Invalid 'since': {since} is less than 0.", "since")
    if not 1 <= limit <= MAX_LOG_PAGE:
        raise errors.bad_request(
            f"Invalid 'limit': {limit} must be at least 1 and at most {MAX_LOG_PAGE}.", "limit"
        )
    log = gateway_of(request).pools.first.flow.log
    records = list(log.since(since, limit))
    next_index = max(since, log.first_index) + len(records)
    return json_response(
        {
            "first_index": log.first_index,
            "next_index": next_index,
            "records": records,
            "tenants": tenant_names(gateway_of(request), (record.tenant_id for record in records)),
        }
    )


@get(
    "/admin/v1/forecasts",
    opt=READ,
    summary="How good the forecasts are",
    description="Of output lengths: each layer of the gateway, by model, and the length probe of each engine"
    " against what was predicted on arrival; and the engines' step times.",
)
async def forecasts(request: Request) -> Response[bytes]:
    return json_response(forecasts_of(gateway_of(request)))


HANDLERS = [status, dispatch_log, forecasts]
