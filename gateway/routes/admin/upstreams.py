"""Admin routes: served models and their replicas (list, drain, resume), aliases, tiers."""

from __future__ import annotations

from litestar import Response, get, post
from litestar.params import FromPath

from gateway.http.asgi import Request
from gateway.routes.admin.common import CHANGE, READ, actor, changed, if_match, tagged
from gateway.routes.context import asked_or_not, gateway_of, json_response
from gateway.routes.one_worker import by_one_worker
from gateway.routes.views.upstreams_view import (
    STATES,
    aliases_of,
    find_drain,
    find_replica,
    tiers_of,
    upstreams_of,
)
from tenants.admin.commands import ReplicaDrain

WHAT_STATES_MEAN = "; ".join(f"{state}: {what}" for state, what in STATES.items())


@get(
    "/admin/v1/upstreams",
    before_request=by_one_worker,
    opt=READ,
    summary="Served models and their replicas",
    description=f"Of each replica `state` ({WHAT_STATES_MEAN}), `in_flight` (requests of all gateways that"
    " share a Redis, as is `queued`; `gateways_missing` did not answer), its `drain` or null, and what the"
    " gateway knows of it. `drained_elsewhere`: drains of replicas that only other gateways have. `members`: engines that run"
    " elsewhere, each with the source that names it, its `state` and `why` it does not serve; and sources"
    " that fail.",
)
async def list_upstreams(request: Request) -> Response[bytes]:
    return json_response(await upstreams_of(gateway_of(request)))


@get(
    "/admin/v1/upstreams/{replica:str}/drain",
    opt=READ,
    summary="Show the drain of a replica",
    description="404 where it is not drained. Also one that only other gateways have, by the name in its"
    " drain.",
)
async def show_drain(request: Request, replica: FromPath[str]) -> Response[bytes]:
    gateway = gateway_of(request)
    await gateway.directory.refresh()
    drain = find_drain(gateway, replica).as_json()
    return tagged(json_response(drain), drain)


@post(
    "/admin/v1/upstreams/{replica:str}/drain",
    status_code=200,
    opt=CHANGE | {"body": ReplicaDrain, "body_is_optional": True},
    summary="Drain a replica",
    description="It gets no new requests, from any gateway, also after restarts, until it is resumed. What"
    " runs on an engine of ours goes on at another one as soon as there is room; what runs on another server"
    " ends there. What waits goes to the model's other replicas; where there is none, requests are"
    " treated as while a replica is away: those that wait do so a while longer, and new ones are"
    " refused with 503 `engine_unavailable`.",
)
async def drain_replica(request: Request, replica: FromPath[str]) -> Response[bytes]:
    wanted = await asked_or_not(request, ReplicaDrain)
    gateway = gateway_of(request)
    pool, upstream = find_replica(gateway, replica)
    drain = await gateway.deps.admin.drains.drain(
        actor(request), pool, upstream.name, wanted, if_match=if_match(request)
    )
    return await changed(request, drain.as_json(), stored=drain.as_json())


@post(
    "/admin/v1/upstreams/{replica:str}/resume",
    status_code=200,
    opt=CHANGE,
    summary="Put a drained replica back into rotation",
    description="Also one that only other gateways have, by the name in its drain.",
)
async def resume_replica(request: Request, replica: FromPath[str]) -> Response[bytes]:
    gateway = gateway_of(request)
    await gateway.directory.refresh()
    where = find_drain(gateway, replica)
    drain = await gateway.deps.admin.drains.resume(
        actor(request), *where.identity, if_match=if_match(request)
    )
    return await changed(request, drain.as_json())


@get("/admin/v1/aliases", opt=READ, summary="Other names of models: stored ones and those of the settings")
async def list_aliases(request: Request) -> Response[bytes]:
    return json_response({"object": "list", "data": aliases_of(gateway_of(request))})


@get(
    "/admin/v1/tiers",
    opt=READ,
    summary="The tiers, the first one first",
    description="`service_tier` is the name in the API; `price_thousandths` multiplies the price of models"
    " that are priced from now on; `queue_ttl_s` is the longest wait; `brake_share` that of"
    " its brake (`GET /admin/v1/brake`), or null.",
)
async def list_tiers(request: Request) -> Response[bytes]:
    return json_response({"object": "list", "data": tiers_of(gateway_of(request))})


HANDLERS = [list_upstreams, show_drain, drain_replica, resume_replica, list_aliases, list_tiers]
