"""Admin routes of brakes: show, set, end."""

from __future__ import annotations

from litestar import Response, delete, get, put
from litestar.params import FromQuery

from gateway.http.asgi import Request
from gateway.routes.admin.common import CHANGE, READ, actor, changed, if_match
from gateway.routes.context import admin_of, asked, gateway_of, json_response
from gateway.routes.openapi_fields import one_of
from tenants.admin.commands import BRAKED_TIERS, BrakeEnd, BrakeSet
from tenants.admin.platform.brakes import MAX_BRAKE_S

TIERS = " or ".join(tier.value for tier in BRAKED_TIERS)


@get("/admin/v1/brake", opt=READ, summary="The brakes that hold now, at most one a tier")
async def list_brakes(request: Request) -> Response[bytes]:
    brakes = await admin_of(request).brakes.all()
    return json_response({"object": "list", "data": [brake.as_json() for brake in brakes]})


@put(
    "/admin/v1/brake",
    opt=CHANGE | {"body": BrakeSet},
    summary="Brake a tier for a while",
    description=f"`tier` ({TIERS}) may hold `share` of places, KV cache and step tokens of every engine, in"
    f" every gateway, for `for_s` seconds (at most {MAX_BRAKE_S}); then it ends by itself. It replaces the"
    " tier's earlier one. What runs already runs on.",
)
async def set_brake(request: Request) -> Response[bytes]:
    wanted = await asked(request, BrakeSet)
    gateway = gateway_of(request)
    brake = await gateway.deps.admin.brakes.set(actor(request), wanted, if_match=if_match(request))
    answer = await changed(request, brake.as_json(), stored=brake.as_json())
    await gateway.brakes.follow()
    return answer


@delete(
    "/admin/v1/brake",
    status_code=200,
    opt=CHANGE | {"parameters": {"tier": one_of(BRAKED_TIERS)}},
    summary="End a tier's brake before its time",
)
async def end_brake(request: Request, tier: FromQuery[str]) -> Response[bytes]:
    gateway = gateway_of(request)
    brake = await gateway.deps.admin.brakes.end(
        actor(request), BrakeEnd(tier=tier), if_match=if_match(request)
    )
    answer = await changed(request, brake.as_json())
    await gateway.brakes.follow()
    return answer


HANDLERS = [list_brakes, set_brake, end_brake]
