"""Admin route of the price book: its history."""

from __future__ import annotations

from litestar import Response, get
from litestar.params import FromQuery

from gateway.http.asgi import Request
from gateway.routes.admin.common import PAGED, paged
from gateway.routes.context import admin_of
from tenants.admin.cursor import DEFAULT_PAGE, PAGES
from tenants.pricing.price_row import PriceRow


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


HANDLERS = [price_history]
