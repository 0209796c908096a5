"""`fairgate webhook`: who is told of alerts, and what was sent."""

from __future__ import annotations

import click

from ops.cli.administer import administer, named_list
from ops.cli.base import answer
from ops.cli.resource_commands import groups
from ops.reporting import table
from tenants.outbox.outbox import Delivery
from tenants.outbox.webhook import Webhook
from tenants.resources.webhooks import WEBHOOKS

webhook = groups((WEBHOOKS,))["webhook"]


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
