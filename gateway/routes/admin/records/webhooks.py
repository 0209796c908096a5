"""Admin routes: webhooks, what was sent to them, and alerts."""

from __future__ import annotations

from typing import Annotated

from litestar import Response, delete, get, post
from litestar.params import FromPath, FromQuery, QueryParameter

from gateway import errors
from gateway.http.asgi import Request
from gateway.routes.admin.common import PAGED, READ, WRITE, actor, listed, named, paged
from gateway.routes.context import admin_of, asked, asked_or_not, json_response
from gateway.routes.openapi_fields import one_of
from tenants.admin.cursor import DEFAULT_PAGE, PAGES
from tenants.admin.webhooks import MOST_SHOWN, DeliveryAgain, Webhook, WebhookAdd
from tenants.outbox.kinds import SUBJECTS
from tenants.outbox.outbox import Delivery
from tenants.outbox.transitions import Incident

STATES = ("pending", "delivered", "dead")
ALERT_STATES = ("firing", "resolved")
State = Annotated[str | None, QueryParameter(name="state")]


@get(
    "/admin/v1/alerts",
    opt=READ | {"parameters": {"state": one_of(ALERT_STATES)}},
    summary="Alerts: those that fire, and those that are over",
    description=f"Evaluated by the server, by tenant too; the newest first, at most {MOST_SHOWN}. `state`:"
    " firing or resolved; without it both. `page`: of the console, with the evidence.",
)
async def list_alerts(request: Request, wanted: State = None) -> Response[bytes]:
    _check("state", wanted, ALERT_STATES)
    fires = None if wanted is None else wanted == "firing"
    incidents = await admin_of(request).webhooks.alerts(fires=fires)
    return await listed(request, [Incident.as_json(incident) for incident in incidents])


@get("/admin/v1/webhooks", opt=PAGED, summary="List webhooks", description=PAGES)
async def list_webhooks(
    request: Request, cursor: FromQuery[str | None] = None, limit: FromQuery[int] = DEFAULT_PAGE
) -> Response[bytes]:
    page = await admin_of(request).webhooks.page(cursor=cursor, limit=limit)
    return await paged(request, page, Webhook.as_json)


@post(
    "/admin/v1/webhooks",
    status_code=201,
    opt=WRITE | {"body": WebhookAdd},
    summary="Add a webhook",
    description="Events are sent to `url` as Standard Webhooks (standardwebhooks.com): signed with `secret`,"
    " which is answered this once. `tenant`: events of this tenant alone; without it those of all tenants and"
    f" of the platform. `subjects`: only these of {', '.join(SUBJECTS)}. A private address is refused unless"
    " `gateway.webhook_private` is set.",
)
async def add_webhook(request: Request) -> Response[bytes]:
    wanted = await asked(request, WebhookAdd)
    made, secret = await admin_of(request).webhooks.add(actor(request), wanted)
    return json_response(await named(request, made.as_json()) | {"secret": secret}, 201)


@get("/admin/v1/webhooks/{webhook:str}", opt=READ, summary="Show a webhook")
async def show_webhook(request: Request, webhook: FromPath[str]) -> Response[bytes]:
    return await _shown(request, await admin_of(request).webhooks.show(webhook))


@delete(
    "/admin/v1/webhooks/{webhook:str}",
    status_code=200,
    opt=WRITE,
    summary="Remove a webhook",
    description="With all that is still to be sent to it.",
)
async def remove_webhook(request: Request, webhook: FromPath[str]) -> Response[bytes]:
    admin = admin_of(request)
    return await _shown(request, await admin.webhooks.remove(actor(request), webhook))


@post(
    "/admin/v1/webhooks/{webhook:str}/test",
    status_code=201,
    opt=WRITE,
    summary="Send a test event to a webhook",
)
async def test_webhook(request: Request, webhook: FromPath[str]) -> Response[bytes]:
    put = await admin_of(request).webhooks.test(actor(request), webhook)
    return json_response(await named(request, put.as_json()), 201)


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


@post(
    "/admin/v1/webhooks/{webhook:str}/resend",
    status_code=200,
    opt=WRITE | {"body": DeliveryAgain, "body_is_optional": True},
    summary="Send dead letters of a webhook again",
    description="One (`seq`), or without a body all. Receivers get the ids that the events had. What waits"
    " for another attempt is tried at once.",
)
async def resend(request: Request, webhook: FromPath[str]) -> Response[bytes]:
    wanted = await asked_or_not(request, DeliveryAgain)
    count = await admin_of(request).webhooks.resend(actor(request), webhook, wanted)
    return json_response({"webhook": webhook, "events": count})


async def _shown(request: Request, webhook: Webhook) -> Response[bytes]:
    return json_response(await named(request, webhook.as_json()))


def _check(name: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise errors.bad_request(f"Invalid '{name}': '{value[:64]}' is not one of {', '.join(known)}.", name)


HANDLERS = [
    list_alerts,
    list_webhooks,
    add_webhook,
    show_webhook,
    remove_webhook,
    test_webhook,
    list_deliveries,
    resend,
]
