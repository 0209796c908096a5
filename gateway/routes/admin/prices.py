"""Admin routes of the price book: list, set, history."""

from __future__ import annotations

from litestar import Response, get, post
from litestar.params import FromQuery

from gateway.http.asgi import Request
from gateway.routes.admin.common import CHANGE, PAGED, actor, changed, if_match, paged, tagged
from gateway.routes.context import admin_of, asked
from tenants.admin.commands import PriceSet
from tenants.admin.cursor import DEFAULT_PAGE, PAGES
from tenants.admin.prices import PriceRow, as_stored


@get(
    "/admin/v1/prices",
    opt=PAGED,
    summary="The prices in force, by model and tier",
    description="Money in nano-dollars a token before the multiplier; multiplier and weights in thousandths."
    f" `model`: those of one, with their `ETag`. {PAGES}",
)
async def list_prices(
    request: Request,
    model: FromQuery[str | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
) -> Response[bytes]:
    page = await admin_of(request).prices.page(model, cursor=cursor, limit=limit)
    answer = await paged(request, page, PriceRow.as_json)
    stored = None if model is None or cursor is not None else as_stored(page.rows)
    return answer if stored is None or page.next_cursor is not None else tagged(answer, stored)


@get(
    "/admin/v1/prices/history",
    opt=PAGED,
    summary="Every version of one model's prices, newest first",
    description="Ledger rows name the version they were charged by." + f" {PAGES}",
)
async def price_history(
    request: Request,
    model: FromQuery[str],
    cursor: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
) -> Response[bytes]:
    page = await admin_of(request).prices.page_history(model, cursor=cursor, limit=limit)
    return await paged(request, page, PriceRow.as_json)


@post(
    "/admin/v1/prices",
    status_code=201,
    opt=CHANGE | {"body": PriceSet},
    summary="Make a new version of the price book",
    description="What is not named stays as it is. A model without a price is refused; `free` is a price.",
)
async def set_price(request: Request) -> Response[bytes]:
    wanted = await asked(request, PriceSet)
    rows = await admin_of(request).prices.set(actor(request), wanted, if_match=if_match(request))
    shown = {"object": "list", "data": [row.as_json() for row in rows]}
    return await changed(request, shown, 201, stored=as_stored(rows))


HANDLERS = [list_prices, price_history, set_price]
