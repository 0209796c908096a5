"""Admin routes: the running server: status, dispatch log, forecasts."""

from __future__ import annotations

from litestar import Response, get
from litestar.params import FromQuery

from gateway import errors
from gateway.http.asgi import Request
from gateway.routes.admin.common import READ
from gateway.routes.context import gateway_of, is_of_sibling, json_response
from gateway.routes.health import readiness_of
from gateway.routes.one_worker import by_one_worker
from gateway.routes.openapi_fields import between
from gateway.routes.views.policy_view import tenant_names
from gateway.routes.views.status_view import forecasts_of, status_of
from gateway.workers.siblings import WORKER

MAX_LOG_PAGE = 5_000
OF_WORKER = (
    "Where several workers serve one port, each has its own: that of `worker`, else of the first; the status"
    " has their numbers."
)


@get(
    "/admin/v1/status",
    opt=READ,
    summary="Queue, tenants, engines and refusals, now",
    description="Each tenant's `tiers`: what waits and runs, its part of the tier's service of about the last"
    " minute (`share`) against the weighted max-min one (`fair_share`), and of its last requests the waits"
    " that they were told and had. `readiness` is what `/readyz` says. `control`, of each model: where its"
    " knobs stand, or would by its advice, and its last moves with their reasons. `active`: only tenants with"
    " something that waits, runs or was served, without their limits and without `readiness`. Where several"
    " workers serve one port, what each counts is summed, the rest is as the first of them says, and"
    " `workers` names them with their process and gateway id.",
)
async def status(request: Request, active: FromQuery[bool] = False) -> Response[bytes]:
    gateway = gateway_of(request)
    own = is_of_sibling(request)
    shown = await status_of(gateway, active_only=active, own=own)
    return json_response(shown if active or own else shown | {"readiness": await readiness_of(gateway)})


@get(
    "/admin/v1/dispatch-log",
    before_request=by_one_worker,
    opt=READ | {"parameters": {"since": between(0), "limit": between(1, MAX_LOG_PAGE), WORKER: between(0)}},
    summary="The flow controller's events",
    description="Arrivals, dispatches (with the counters of all who waited), corrections of charges by"
    " the length that an engine foresees, and settlements from index `since` on, at most `limit`."
    " `first_index` is the oldest that is kept; `tenants` has names by id. " + OF_WORKER,
)
async def dispatch_log(
    request: Request, since: FromQuery[int] = 0, limit: FromQuery[int] = 1000, worker: FromQuery[int] = 0
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
    before_request=by_one_worker,
    opt=READ | {"parameters": {WORKER: between(0)}},
    summary="How good the forecasts are",
    description="Of output lengths: each layer of the gateway, by model, and the length probe of each engine"
    " against what was predicted on arrival; and the engines' step times. " + OF_WORKER,
)
async def forecasts(request: Request, worker: FromQuery[int] = 0) -> Response[bytes]:
    return json_response(forecasts_of(gateway_of(request)))


HANDLERS = [status, dispatch_log, forecasts]
