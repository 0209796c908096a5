"""Admin route: what was sent to a webhook."""

from __future__ import annotations

from typing import Annotated

from litestar import Response, get
from litestar.params import FromPath, QueryParameter

from gateway import errors
from gateway.http.asgi import Request
from gateway.routes.admin.common import READ, listed
from gateway.routes.context import admin_of
from gateway.routes.openapi_fields import one_of
from tenants.admin.webhooks import MOST_SHOWN
from tenants.outbox.outbox import Delivery

STATES = ("pending", "delivered", "dead")
State = Annotated[str | None, QueryParameter(name="state")]


@get(
    "/admin/v1/webhooks/{webhook:str}/deliveries",
    opt=READ | {"parameters": {"state": one_of(STATES)}},
    summary="What was sent to a webhook, and what is to be",
    description=f"The newest first, at most {MOST_SHOWN}. `state`: pending (also after failures: `error` is"
    " the last one, `next_at` the next attempt), delivered, or dead: given up after a day.",
)
async def list_deliveries(request: Request, webhook: FromPath[str], wanted: State = None) -> Response[bytes]:
    _check("state", wanted, STATES)
    deliveries = await admin_of(request).webhooks.deliveries(webhook, state=wanted)
    return await listed(request, [Delivery.as_json(delivery) for delivery in deliveries])


def _check(name: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise errors.bad_request(f"Invalid '{name}': '{value[:64]}' is not one of {', '.join(known)}.", name)


HANDLERS = [list_deliveries]
