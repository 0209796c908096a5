"""Reads of webhooks, of what was sent to them, and of alerts."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sqlalchemy import Connection, false, func, or_, select
from sqlalchemy.sql import ColumnElement

from tenants.admin.cursor import DEFAULT_PAGE, Page, Text, beyond, checked_limit, decode_cursor, page_of
from tenants.admin.transaction import AdminCommands
from tenants.admin.webhooks.commands import Webhook
from tenants.directory import queries
from tenants.errors import NotFound
from tenants.outbox import incidents as incident_store
from tenants.outbox import outbox as store
from tenants.outbox.outbox import Delivery
from tenants.outbox.signing import unseal
from tenants.outbox.transitions import Incident
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


class WebhookReads(AdminCommands):
    async def list_webhooks(self, whose: Whose = None) -> list[Webhook]:
        return await self._database.read(lambda one: _where(one, *seen(webhooks.c.tenant_id, whose)))

    async def page_webhooks(
        self, whose: Whose = None, *, cursor: str | None = None, limit: int = DEFAULT_PAGE
    ) -> Page[Webhook]:
        """Raises `Invalid`."""
        most = checked_limit(limit)
        last = None if cursor is None else decode_cursor("webhooks", {}, cursor, tuple[Text])
        wanted = seen(webhooks.c.tenant_id, whose)
        if last is not None:
            wanted.append(beyond([webhooks.c.id], last))
        found = await self._database.read(lambda one: _where(one, *wanted, most=most + 1))
        return page_of(found, most, "webhooks", {}, lambda each: (each.webhook_id,))

    async def show_webhook(self, webhook: str, whose: Whose = None) -> Webhook:
        """Raises `NotFound`."""
        return await self._database.read(lambda one: find_webhook(one, webhook, whose))

    async def deliveries(
        self, webhook: str, *, state: str | None = None, whose: Whose = None, most: int = MOST_SHOWN
    ) -> list[Delivery]:
        def look(connection: Connection) -> list[Delivery]:
            conditions = [outbox.c.webhook_id == find_webhook(connection, webhook, whose).webhook_id]
            if state is not None:
                conditions.append(outbox.c.state == state)
            return store.deliveries(connection, *conditions, most=min(most, MOST_SHOWN))

        return await self._database.read(look)

    async def count_deliveries(self, ids: Iterable[str]) -> dict[str, dict[str, int]]:
        """Of these webhooks, by webhook and state."""
        found: dict[str, dict[str, int]] = {webhook_id: {} for webhook_id in ids}

        def look(connection: Connection) -> None:
            for chunk in queries.chunks(list(found)):
                query = select(outbox.c.webhook_id, outbox.c.state, func.count())
                query = query.where(outbox.c.webhook_id.in_(chunk))
                for webhook_id, state, count in connection.execute(
                    query.group_by(outbox.c.webhook_id, outbox.c.state)
                ):
                    found[webhook_id][state] = count

        await self._database.read(look)
        return found

    async def list_alerts(
        self, whose: Whose = None, *, fires: bool | None = None, most: int = MOST_SHOWN
    ) -> list[Incident]:
        """Alerts that fire (`fires`), that are resolved, or both; newest first, at most `most`."""
        conditions = seen(incidents.c.tenant_id, whose)
        if fires is not None:
            is_open = incidents.c.resolved_us.is_(None)
            conditions.append(is_open if fires else ~is_open)
        return await self._database.read(
            lambda one: incident_store.latest(one, *conditions, most=min(most, MOST_SHOWN))
        )

    async def webhook_secret(self, webhook_id: str) -> tuple[str, bytes]:
        """The URL of a webhook and its signing secret. Raises `NotFound`, `Invalid`."""
        query = select(webhooks.c.sealed).where(webhooks.c.id == webhook_id)
        sealed = await self._database.read(lambda one: one.execute(query).scalar())
        if sealed is None:
            raise NotFound("webhook", webhook_id)
        return unseal(self._pepper, webhook_id, sealed)


def find_webhook(connection: Connection, webhook: str, whose: Whose = None) -> Webhook:
    """Raises `NotFound`."""
    is_it = webhooks.c.id == queries.plain(webhook)
    found = _where(connection, is_it, *seen(webhooks.c.tenant_id, whose))
    if not found:
        raise NotFound("webhook", webhook[:80])
    return found[0]


def _where(
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
