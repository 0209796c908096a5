"""Admin acts on webhooks, and reads: of them, of their deliveries, and of alerts.

Secrets are shown once, and stored encrypted with the URL. Audit rows hold no secret, and only the host."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from sqlalchemy import Connection, delete, false, func, insert, or_, select
from sqlalchemy.sql import ColumnElement

from tenants.admin.audit import Actor
from tenants.admin.transaction import AdminActs, Change
from tenants.directory import queries
from tenants.directory.keys import PEPPER_SETTING, fingerprint, new_id
from tenants.errors import Invalid, NotFound, PepperMismatch
from tenants.outbox import incidents as incident_store
from tenants.outbox import outbox as store
from tenants.outbox.address import target_of
from tenants.outbox.kinds import TEST
from tenants.outbox.lookup import address_of
from tenants.outbox.outbox import Delivery, OutboxEvent
from tenants.outbox.signing import NONCE_BYTES, SECRET_BYTES, seal, secret_text, unseal
from tenants.outbox.transitions import Incident
from tenants.outbox.webhook import DeliveryAgain, Webhook, WebhookAdd, checked_subjects
from tenants.storage.tables import incidents, outbox, webhooks

MAX_WEBHOOKS = 2_000
MOST_SHOWN = 200
"""Deliveries, and alerts, of one answer."""
_COLUMNS = [
    webhooks.c.id.label("webhook_id"),
    *(webhooks.c[name] for name in ("tenant_id", "host", "subjects", "created_us", "by")),
]
Whose = Collection[str] | None
"""Tenants whose things are seen; None: everything, the platform's too."""
MAX_OF_A_TENANT = 5
MAX_OF_THE_PLATFORM = 20


class WebhookActs(AdminActs):
    async def all(self, whose: Whose = None) -> list[Webhook]:
        return await self._transactions.read(
            lambda one: webhooks_where(one, *seen(webhooks.c.tenant_id, whose))
        )

    async def show(self, webhook: str, whose: Whose = None) -> Webhook:
        """Raises `NotFound`."""
        return await self._transactions.read(lambda one: find_webhook(one, webhook, whose))

    async def deliveries(
        self, webhook: str, *, state: str | None = None, whose: Whose = None, most: int = MOST_SHOWN
    ) -> list[Delivery]:
        def look(connection: Connection) -> list[Delivery]:
            conditions = [outbox.c.webhook_id == find_webhook(connection, webhook, whose).webhook_id]
            if state is not None:
                conditions.append(outbox.c.state == state)
            return store.deliveries(connection, *conditions, most=min(most, MOST_SHOWN))

        return await self._transactions.read(look)

    async def count_deliveries(self, ids: Iterable[str]) -> dict[str, dict[str, int]]:
        """Of these webhooks, by webhook and state."""
        counts: dict[str, dict[str, int]] = {webhook_id: {} for webhook_id in ids}

        def look(connection: Connection) -> None:
            for chunk in queries.chunks(list(counts)):
                query = select(outbox.c.webhook_id, outbox.c.state, func.count())
                query = query.where(outbox.c.webhook_id.in_(chunk))
                for webhook_id, state, count in connection.execute(
                    query.group_by(outbox.c.webhook_id, outbox.c.state)
                ):
                    counts[webhook_id][state] = count

        await self._transactions.read(look)
        return counts

    async def alerts(
        self, whose: Whose = None, *, fires: bool | None = None, most: int = MOST_SHOWN
    ) -> list[Incident]:
        """Alerts that fire (`fires`), that are resolved, or both; newest first, at most `most`."""
        conditions = seen(incidents.c.tenant_id, whose)
        if fires is not None:
            is_open = incidents.c.resolved_us.is_(None)
            conditions.append(is_open if fires else ~is_open)
        return await self._transactions.read(
            lambda one: incident_store.latest(one, *conditions, most=min(most, MOST_SHOWN))
        )

    async def secret(self, webhook_id: str) -> tuple[str, bytes]:
        """The URL of a webhook and its signing secret. Raises `NotFound`, `Invalid`."""
        query = select(webhooks.c.sealed).where(webhooks.c.id == webhook_id)
        sealed = await self._transactions.read(lambda one: one.execute(query).scalar())
        if sealed is None:
            raise NotFound("webhook", webhook_id)
        return unseal(self._transactions.pepper, webhook_id, sealed)

    async def add(self, actor: Actor | str, wanted: WebhookAdd) -> tuple[Webhook, str]:
        """Returns the webhook with its secret, which cannot be read again. Raises `Invalid` for an address
        that is private or cannot be resolved."""
        allows_private = self._transactions.webhook_private
        target = target_of(wanted.url, allows_private=allows_private)
        subjects = checked_subjects(wanted.subjects, of_tenant=wanted.tenant is not None)
        await address_of(target, allows_private=allows_private)
        pepper = self._transactions.pepper
        webhook_id, secret = new_id("whk"), secrets.token_bytes(SECRET_BYTES)
        by = actor if isinstance(actor, str) else actor.name
        parts = urlsplit(wanted.url)
        host = f"{parts.scheme}://{parts.netloc}"

        def change(connection: Connection, now_us: int) -> Change[Webhook]:
            if queries.setting(connection, PEPPER_SETTING) not in (None, fingerprint(pepper)):
                raise PepperMismatch
            owner = None if wanted.tenant is None else queries.find_tenant(connection, wanted.tenant)
            tenant_id = "" if owner is None else owner.tenant_id
            most = MAX_OF_THE_PLATFORM if owner is None else MAX_OF_A_TENANT
            if queries.count(connection, webhooks, webhooks.c.tenant_id == tenant_id) >= most:
                whose = "the platform" if owner is None else f"tenant {owner.name}"
                raise Invalid("webhook", f"{whose} has {most}, the limit: remove one")
            if queries.count(connection, webhooks) >= MAX_WEBHOOKS:
                raise Invalid("webhook", f"the limit of {MAX_WEBHOOKS} is reached: remove one")
            made = Webhook(webhook_id, tenant_id, host, subjects, now_us, by)
            connection.execute(
                insert(webhooks).values(
                    id=webhook_id,
                    tenant_id=tenant_id,
                    host=host,
                    subjects=list(subjects),
                    sealed=seal(pepper, webhook_id, wanted.url, secret, secrets.token_bytes(NONCE_BYTES)),
                    created_us=now_us,
                    by=by,
                )
            )
            return Change(made, webhook_id, tenant_id or None, after=made.as_json())

        return await self._transactions.act(actor, "webhook.add", change), secret_text(secret)

    async def remove(self, actor: Actor | str, webhook: str, whose: Whose = None) -> Webhook:
        """Removes a webhook with its pending events. Raises `NotFound`."""

        def change(connection: Connection, now_us: int) -> Change[Webhook]:
            hook = find_webhook(connection, webhook, whose)
            connection.execute(delete(outbox).where(outbox.c.webhook_id == hook.webhook_id))
            connection.execute(delete(webhooks).where(webhooks.c.id == hook.webhook_id))
            return Change(hook, hook.webhook_id, hook.tenant_id or None, before=hook.as_json())

        return await self._transactions.act(actor, "webhook.remove", change)

    async def test(self, actor: Actor | str, webhook: str, whose: Whose = None) -> Delivery:
        """Queues an event for it and retries waiting ones now. Raises `Invalid` where too many wait."""

        def change(connection: Connection, now_us: int) -> Change[Delivery]:
            hook = find_webhook(connection, webhook, whose)
            event = OutboxEvent(
                TEST, hook.tenant_id, {"webhook": hook.webhook_id, "summary": "This is a test."}
            )
            [put] = store.put(connection, [event], now_us, only=hook.webhook_id)
            if put.state == "dead":
                raise Invalid("webhook", put.error)
            store.try_now(connection, hook.webhook_id, now_us)
            return Change(put, hook.webhook_id, hook.tenant_id or None, after={"event": put.event_id})

        return await self._transactions.act(actor, "webhook.test", change)

    async def resend(
        self, actor: Actor | str, webhook: str, wanted: DeliveryAgain, whose: Whose = None
    ) -> int:
        """Resends one dead letter, or all, and retries waiting ones; returns how many. Raises `NotFound`."""

        def change(connection: Connection, now_us: int) -> Change[int]:
            hook = find_webhook(connection, webhook, whose)
            is_it = [outbox.c.webhook_id == hook.webhook_id, outbox.c.state == "dead"]
            if wanted.seq is not None:
                is_it.append(outbox.c.seq == wanted.seq)
            dead = store.deliveries(connection, *is_it, most=store.MAX_PENDING)
            if not dead and wanted.seq is not None:
                raise NotFound("dead letter", str(wanted.seq))
            waiting = [outbox.c.webhook_id == hook.webhook_id, outbox.c.state == "pending"]
            if queries.count(connection, outbox, *waiting) + len(dead) > store.MAX_PENDING:
                raise Invalid("webhook", f"more than {store.MAX_PENDING} events would be waiting, the limit")
            for delivery in dead:
                store.send_again(connection, delivery.seq, now_us)
            store.try_now(connection, hook.webhook_id, now_us)
            return Change(len(dead), hook.webhook_id, hook.tenant_id or None, after={"events": len(dead)})

        return await self._transactions.act(actor, "webhook.resend", change)


def find_webhook(connection: Connection, webhook: str, whose: Whose = None) -> Webhook:
    """Raises `NotFound`."""
    is_it = webhooks.c.id == queries.plain(webhook)
    rows = webhooks_where(connection, is_it, *seen(webhooks.c.tenant_id, whose))
    if not rows:
        raise NotFound("webhook", webhook[:80])
    return rows[0]


def webhooks_where(
    connection: Connection, *conditions: ColumnElement[bool], most: int = MAX_WEBHOOKS
) -> list[Webhook]:
    query = select(*_COLUMNS).where(*conditions).order_by(webhooks.c.id)
    return [
        Webhook(**{**row, "subjects": tuple(row["subjects"])})
        for row in connection.execute(query.limit(most)).mappings()
    ]


def seen(column: ColumnElement[str], whose: Whose) -> list[ColumnElement[bool]]:
    """SQL condition: the tenant in this column is one that is seen."""
    if whose is None:
        return []
    chunks = queries.chunks(sorted(whose))
    return [or_(false(), *(column.in_(chunk) for chunk in chunks))]
