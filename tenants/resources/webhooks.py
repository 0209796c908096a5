"""Webhooks: receivers of alerts and checkpoints of the audit."""

from __future__ import annotations

from functools import partial

from sqlalchemy import Connection

from tenants.admin.admin import Admin
from tenants.admin.cursor import PAGES, SortKey, beyond
from tenants.admin.webhooks import find_webhook, seen, webhooks_where
from tenants.outbox.webhook import DeliveryAgain, Webhook, WebhookAdd
from tenants.people.roles import Act
from tenants.resources.query import ListQuery
from tenants.resources.resource import ActCall, ActDone, PageRequest, Resource, ResourceAct
from tenants.storage.tables import webhooks


class WebhookQuery(ListQuery, frozen=True):
    """All of them."""


def _read(connection: Connection, request: PageRequest) -> tuple[list[Webhook], SortKey | None]:
    wanted = seen(webhooks.c.tenant_id, request.only)
    if request.after is not None:
        wanted.append(beyond([webhooks.c.id], request.after))
    return webhooks_where(connection, *wanted, most=request.most), None


async def _add(admin: Admin, call: ActCall) -> ActDone:
    made, secret = await admin.webhooks.add(call.actor, call.command)
    return ActDone(made.as_json() | {"secret": secret}, None)


async def _remove(admin: Admin, call: ActCall) -> ActDone:
    return ActDone((await admin.webhooks.remove(call.actor, call.reference)).as_json(), None)


async def _test(admin: Admin, call: ActCall) -> ActDone:
    return ActDone((await admin.webhooks.test(call.actor, call.reference)).as_json(), None)


async def _resend(admin: Admin, call: ActCall) -> ActDone:
    count = await admin.webhooks.resend(call.actor, call.reference, call.command)
    return ActDone({"webhook": call.reference, "events": count}, None)


_ACT = partial(ResourceAct, scope="admin:write", act=Act.CHANGE_WEBHOOK, takes_condition=False)
WEBHOOKS = Resource(
    name="webhook",
    plural="webhooks",
    title="Webhooks",
    query=WebhookQuery,
    read=_read,
    order=(webhooks.c.id,),
    key_of=lambda hook: (hook.webhook_id,),
    as_json=Webhook.as_json,
    find=lambda connection, reference, tenant, now_us: find_webhook(connection, reference),
    scope="admin:read",
    act=Act.READ_TENANT,
    summary="List webhooks",
    description=PAGES,
    has_page=False,
    shown=(),
    acts=(
        _ACT(
            "webhook.add",
            _add,
            command=WebhookAdd,
            status=201,
            summary="Add a webhook",
            description="Events are sent to `url` as Standard Webhooks (standardwebhooks.com): signed with"
            " `secret`, which is answered this once. `tenant`: events of this tenant alone; without it those"
            " of all tenants and of the platform. `subjects`: only events of these. A private address is"
            " refused unless `gateway.webhook_private` is set.",
            answers="""(`secret` this once):
      {"id": "whk_…", "tenant_id": null, "tenant": null, "host": "https://hooks.example.org", "subjects": [],
       "created_at": "2026-01-31T18:30:00+00:00", "by": "cli:root", "secret": "whsec_…"}
    """,
            words=lambda hook: (
                f"webhook {hook['id']} added; its secret, shown this once:\n  {hook['secret']}"
            ),
        ),
        _ACT(
            "webhook.remove",
            _remove,
            method="DELETE",
            path="/{reference}",
            summary="Remove a webhook",
            description="With all that is still to be sent to it.",
            answers="what `webhook add` answers, without `secret`.",
            words=lambda hook: f"webhook {hook['id']} removed",
        ),
        _ACT(
            "webhook.test",
            _test,
            path="/{reference}/test",
            status=201,
            summary="Send a test event to a webhook",
            description="A running server sends it; the webhook's deliveries say how it went.",
            answers="what `webhook deliveries` lists, of the one.",
            words=lambda put: (
                f"event {put['event']} waits to be sent: `fairgate webhook deliveries {put['webhook']}`"
            ),
        ),
        _ACT(
            "webhook.resend",
            _resend,
            command=DeliveryAgain,
            is_body_optional=True,
            path="/{reference}/resend",
            summary="Send dead letters of a webhook again",
            description="One (`seq`), or where none is named all. Receivers get the ids that the events had."
            " What waits for another attempt is tried at once.",
            answers='{"webhook": "whk_…", "events": 3}',
            words=lambda done: f"{done['events']} events wait to be sent again",
        ),
    ),
    group_help="""Webhooks for alerts and audit checkpoints.

    They are signed as Standard Webhooks.

    \b
      fairgate webhook add https://hooks.example.org/fairgate
      fairgate webhook add https://acme.example/alerts --tenant acme --subject limit.soft
      fairgate webhook list
      fairgate webhook test whk_…
      fairgate webhook deliveries whk_… --state dead
      fairgate webhook resend whk_…
      fairgate webhook remove whk_…
    """,
)
