"""Admin routes of the price book: list, set, history."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get, post
from litestar.params import FromQuery

from gateway.routes.admin_common import READ, WRITE, actor, asked, changed
from gateway.routes.context import gateway_of, json_response
from tenants.admin.commands import PriceSet


@get(
    "/admin/v1/prices",
    opt=READ,
    summary="The prices in force, by model and tier",
    description="Money in nano-dollars a token before the multiplier; multiplier and weights in thousandths.",
)
async def list_prices(request: Request[Any, Any, Any]) -> Response[bytes]:
    rows = await gateway_of(request).deps.admin.list_prices()
    return json_response({"object": "list", "data": [row.as_json() for row in rows]})


@get(
    "/admin/v1/prices/history",
    opt=READ,
    summary="Every version of one model's prices, newest first",
    description="Ledger rows name the version they were charged by. At most `limit` rows.",
)
async def price_history(
    request: Request[Any, Any, Any], model: FromQuery[str], limit: FromQuery[int] = 100
) -> Response[bytes]:
    rows = await gateway_of(request).deps.admin.price_history(model, most=limit)
    return json_response({"object": "list", "data": [row.as_json() for row in rows]})


@post(
    "/admin/v1/prices",
    status_code=201,
    opt=WRITE | {"body": PriceSet},
    summary="Make a new version of the price book",
    description="What is not named stays as it is. A model without a price is refused; `free` is a price.",
)
async def set_price(request: Request[Any, Any, Any]) -> Response[bytes]:
    wanted = await asked(request, PriceSet)
    rows = await gateway_of(request).deps.admin.set_price(actor(request), wanted)
    return await changed(request, {"object": "list", "data": [row.as_json() for row in rows]}, 201)


HANDLERS = [list_prices, price_history, set_price]
