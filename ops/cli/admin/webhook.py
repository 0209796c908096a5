"""`fairgate webhook`: who is told of alerts, and what was sent."""

from __future__ import annotations

import click

from ops.cli.administer import actor, administer, named_list, named_one
from ops.cli.base import answer, group
from ops.reporting import table
from tenants.admin.webhooks import DeliveryAgain, Webhook, WebhookAdd
from tenants.outbox.kinds import SUBJECTS
from tenants.outbox.outbox import Delivery


@group()
def webhook() -> None:
    """Webhooks: alerts and checkpoints of the audit, signed as Standard Webhooks.

    \b
      fairgate webhook add https://hooks.example.org/fairgate
      fairgate webhook add https://acme.example/alerts --tenant acme --subject limit.soft
      fairgate webhook list
      fairgate webhook test whk_…
      fairgate webhook deliveries whk_… --state dead
      fairgate webhook resend whk_…
      fairgate webhook remove whk_…
    """


@webhook.command()
@click.argument("url")
@click.option("--tenant", help="Only events of this tenant (name or id); without: all, and the platform's.")
@click.option(
    "--subject", "subjects", multiple=True, type=click.Choice(SUBJECTS), help="Only these (repeat)."
)
def add(url: str, tenant: str | None, subjects: tuple[str, ...]) -> None:
    """Adds a webhook and shows the secret by which its receiver checks signatures: this once.

    URL must be https to an address of the internet, unless gateway.webhook_private is set.

    \b
    --json answers:
      {"id": "whk_…", "tenant_id": null, "tenant": null, "host": "https://hooks.example.org", "subjects": [],
       "created_at": "2026-01-31T18:30:00+00:00", "by": "cli:root", "secret": "whsec_…"}
    """
    wanted = WebhookAdd(url=url, tenant=tenant, subjects=list(subjects) or None)
    (made, secret), shown = named_one(
        lambda admin: admin.webhooks.add(actor(), wanted), lambda both: both[0].as_json()
    )
    told = f"webhook {made.webhook_id} added; its secret, shown this once:\n  {secret}"
    answer(shown | {"secret": secret}, told)


@webhook.command(name="list")
def list_() -> None:
    """Lists webhooks, with how many events wait and are given up.

    \b
    --json answers what `webhook add` answers, without "secret", in a list, with
      "deliveries": {"pending": 1, "delivered": 20, "dead": 0}
    """
    hooks, shown = named_list(lambda admin: admin.webhooks.all(), Webhook.as_json)
    counts = administer(lambda admin: admin.webhooks.count_deliveries(hook.webhook_id for hook in hooks))
    rows = [
        (
            hook.webhook_id,
            named["tenant"] or "all, and the platform",
            hook.host,
            ", ".join(hook.subjects) or "all",
            counts[hook.webhook_id].get("pending", 0),
            counts[hook.webhook_id].get("dead", 0),
        )
        for hook, named in zip(hooks, shown, strict=True)
    ]
    columns = ("id", "events of", "host", "subjects", "waiting", "given up")
    answer(
        [hook | {"deliveries": counts[hook["id"]]} for hook in shown],
        lambda: table("webhooks", columns, rows),
    )


@webhook.command()
@click.argument("webhook_id")
def remove(webhook_id: str) -> None:
    """Removes a webhook, with all that is still to be sent to it.

    \b
    --json answers:
      {"id": "whk_…", "removed": true}
    """
    administer(lambda admin: admin.webhooks.remove(actor(), webhook_id))
    answer({"id": webhook_id, "removed": True}, f"webhook {webhook_id} removed")


@webhook.command()
@click.argument("webhook_id")
def test(webhook_id: str) -> None:
    """Has a running server send a test event to a webhook; `webhook deliveries` says how it went.

    \b
    --json answers what `webhook deliveries` lists, of the one.
    """
    put, shown = named_one(lambda admin: admin.webhooks.test(actor(), webhook_id), Delivery.as_json)
    answer(shown, f"event {put.event_id} waits to be sent: `fairgate webhook deliveries {webhook_id}`")


@webhook.command()
@click.argument("webhook_id")
@click.option("--state", type=click.Choice(["pending", "delivered", "dead"]), help="Only these.")
def deliveries(webhook_id: str, state: str | None) -> None:
    """What was sent to a webhook and what is to be, the newest first.

    \b
    --json answers:
      [{"seq": 7, "event": "evt_…", "webhook": "whk_…", "tenant_id": null, "tenant": null, "subject":
        "slo.burn", "state": "pending", "attempts": 3, "error": "it answered 503", "made_at": "2026-…",
        "next_at": "2026-…", "ended_at": null}, …]
    """
    sent, shown = named_list(
        lambda admin: admin.webhooks.deliveries(webhook_id, state=state), Delivery.as_json
    )
    rows = [
        (
            delivery.seq,
            delivery.subject,
            named["tenant"] or "",
            delivery.state,
            delivery.attempts,
            named["made_at"],
            delivery.error,
        )
        for delivery, named in zip(sent, shown, strict=True)
    ]
    columns = ("seq", "subject", "tenant", "state", "attempts", "made at", "error")
    answer(shown, lambda: table("deliveries", columns, rows))


@webhook.command()
@click.argument("webhook_id")
@click.option("--seq", type=int, help="Of one dead letter; without: all.")
def resend(webhook_id: str, seq: int | None) -> None:
    """Has a running server send dead letters again, with the ids that they had.

    \b
    --json answers:
      {"webhook": "whk_…", "events": 3}
    """
    count = administer(lambda admin: admin.webhooks.resend(actor(), webhook_id, DeliveryAgain(seq=seq)))
    answer({"webhook": webhook_id, "events": count}, f"{count} events wait to be sent again")
