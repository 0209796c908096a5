"""Admin acts on webhooks.

A webhook's secret is shown once, and stored encrypted with its URL. Audit rows hold no secret, and of a URL
only its host.
"""

from __future__ import annotations

import secrets
from urllib.parse import urlsplit

from sqlalchemy import Connection, delete, insert

from tenants.admin.audit import Actor
from tenants.admin.transaction import Change
from tenants.admin.webhooks.commands import DeliveryAgain, Webhook, WebhookAdd, checked_subjects
from tenants.admin.webhooks.reads import MAX_WEBHOOKS, WebhookReads, Whose, find_webhook
from tenants.directory import queries
from tenants.directory.keys import PEPPER_SETTING, fingerprint, new_id
from tenants.errors import Invalid, NotFound, PepperMismatch
from tenants.outbox import outbox as store
from tenants.outbox.address import target_of
from tenants.outbox.kinds import TEST
from tenants.outbox.lookup import address_of
from tenants.outbox.outbox import Delivery, OutboxEvent
from tenants.outbox.signing import NONCE_BYTES, SECRET_BYTES, seal, secret_text
from tenants.storage.tables import outbox, webhooks

MAX_OF_A_TENANT = 5
MAX_OF_THE_PLATFORM = 20


class WebhookCommands(WebhookReads):
    async def add_webhook(self, actor: Actor | str, wanted: WebhookAdd) -> tuple[Webhook, str]:
        """Returns the webhook with its secret, which cannot be read again. Raises `Invalid` for an address
        that is private or cannot be resolved."""
        allows_private = self._webhook_private
        target = target_of(wanted.url, allows_private=allows_private)
        subjects = checked_subjects(wanted.subjects, of_tenant=wanted.tenant is not None)
        await address_of(target, allows_private=allows_private)
        webhook_id, secret = new_id("whk"), secrets.token_bytes(SECRET_BYTES)
        by = actor if isinstance(actor, str) else actor.name
        parts = urlsplit(wanted.url)
        host = f"{parts.scheme}://{parts.netloc}"

        def change(connection: Connection, now_us: int) -> Change[Webhook]:
            if queries.setting(connection, PEPPER_SETTING) not in (None, fingerprint(self._pepper)):
                raise PepperMismatch
            owner = None if wanted.tenant is None else queries.find_tenant(connection, wanted.tenant)
            tenant_id = "" if owner is None else owner.tenant_id
            most = MAX_OF_THE_PLATFORM if owner is None else MAX_OF_A_TENANT
            if queries.count(connection, webhooks, webhooks.c.tenant_id == tenant_id) >= most:
                whose = "the platform" if owner is None else f"tenant {owner.name}"
                raise Invalid("webhook", f"{whose} has {most}, which is the most; remove one")
            if queries.count(connection, webhooks) >= MAX_WEBHOOKS:
                raise Invalid("webhook", f"there are {MAX_WEBHOOKS}, which is the most; remove one")
            made = Webhook(webhook_id, tenant_id, host, subjects, now_us, by)
            connection.execute(
                insert(webhooks).values(
                    id=webhook_id,
                    tenant_id=tenant_id,
                    host=host,
                    subjects=list(subjects),
                    sealed=seal(
                        self._pepper, webhook_id, wanted.url, secret, secrets.token_bytes(NONCE_BYTES)
                    ),
                    created_us=now_us,
                    by=by,
                )
            )
            return Change(made, webhook_id, tenant_id or None, after=made.as_json())

        return await self._act(actor, "webhook.add", change), secret_text(secret)

    async def remove_webhook(self, actor: Actor | str, webhook: str, whose: Whose = None) -> Webhook:
        """Removes a webhook with its pending events. Raises `NotFound`."""

        def change(connection: Connection, now_us: int) -> Change[Webhook]:
            found = find_webhook(connection, webhook, whose)
            connection.execute(delete(outbox).where(outbox.c.webhook_id == found.webhook_id))
            connection.execute(delete(webhooks).where(webhooks.c.id == found.webhook_id))
            return Change(found, found.webhook_id, found.tenant_id or None, before=found.as_json())

        return await self._act(actor, "webhook.remove", change)

    async def test_webhook(self, actor: Actor | str, webhook: str, whose: Whose = None) -> Delivery:
        """Puts an event into the outbox for this webhook alone; what waits before it is tried at once. Raises
        `Invalid` where too many wait."""

        def change(connection: Connection, now_us: int) -> Change[Delivery]:
            found = find_webhook(connection, webhook, whose)
            event = OutboxEvent(
                TEST, found.tenant_id, {"webhook": found.webhook_id, "summary": "This is a test."}
            )
            [put] = store.put(connection, [event], now_us, only=found.webhook_id)
            if put.state == "dead":
                raise Invalid("webhook", put.error)
            store.try_now(connection, found.webhook_id, now_us)
            return Change(put, found.webhook_id, found.tenant_id or None, after={"event": put.event_id})

        return await self._act(actor, "webhook.test", change)

    async def resend(
        self, actor: Actor | str, webhook: str, wanted: DeliveryAgain, whose: Whose = None
    ) -> int:
        """Sends one dead letter again, or all; returns how many. What waits for a retry is tried at once.
        Raises `NotFound`."""

        def change(connection: Connection, now_us: int) -> Change[int]:
            found = find_webhook(connection, webhook, whose)
            is_it = [outbox.c.webhook_id == found.webhook_id, outbox.c.state == "dead"]
            if wanted.seq is not None:
                is_it.append(outbox.c.seq == wanted.seq)
            dead = store.deliveries(connection, *is_it, most=store.MAX_PENDING)
            if not dead and wanted.seq is not None:
                raise NotFound("dead letter", str(wanted.seq))
            waiting = [outbox.c.webhook_id == found.webhook_id, outbox.c.state == "pending"]
            if queries.count(connection, outbox, *waiting) + len(dead) > store.MAX_PENDING:
                raise Invalid(
                    "webhook", f"more than {store.MAX_PENDING} events would wait, which is the most"
                )
            for each in dead:
                store.send_again(connection, each.seq, now_us)
            store.try_now(connection, found.webhook_id, now_us)
            return Change(len(dead), found.webhook_id, found.tenant_id or None, after={"events": len(dead)})

        return await self._act(actor, "webhook.resend", change)
