"""List of refused requests that were kept whole: filters, order and cursors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from sqlalchemy import Connection
from sqlalchemy.sql import ColumnElement

from tenants.admin.cursor import Page, Text, beyond, checked_limit, decode_cursor, page_of
from tenants.admin.lists.scans import between, end_of_scan
from tenants.admin.transaction import AdminActs
from tenants.counts import refusal_store
from tenants.counts.refusal_store import (
    MAX_CODE_CHARACTERS,
    MAX_ID_CHARACTERS,
    MAX_MODEL_CHARACTERS,
    RefusedRequest,
)
from tenants.directory import queries
from tenants.errors import Invalid
from tenants.storage.tables import refusals
from tenants.types import Tier

MAX_NAME_CHARACTERS = 64
RENAMED = {"since": "from", "until": "to"}
Instant = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Conditions = list[ColumnElement[bool]]


class RefusalQuery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename=RENAMED):
    """Which refusals. None: any."""

    request_id: str | None = None
    tenant: str | None = None
    """Name or id, as of the project and the key."""
    project: str | None = None
    key: str | None = None
    model: str | None = None
    """As it was asked for."""
    tier: str | None = None
    code: str | None = None
    limit_id: str | None = None
    since: str | None = None
    until: str | None = None


class RefusalReads(AdminActs):
    """Reads of refusals. Each raises `Invalid`, `NotFound`, `DatabaseUnavailable`."""

    async def read(
        self,
        query: RefusalQuery,
        *,
        cursor: str | None = None,
        limit: int = 100,
        of_tenant: str | None = None,
    ) -> Page[RefusedRequest]:
        """Newest first. `of_tenant`: only those of the tenant with this id, as it may see them."""
        filters, most = msgspec.to_builtins(query), checked_limit(limit)
        name = "refusals" if of_tenant is None else f"refusals of {of_tenant}"
        last = None if cursor is None else decode_cursor(name, filters, cursor, tuple[Instant, Text])

        order = (refusals.c.at_us, refusals.c.request_id)

        def read(connection: Connection) -> tuple[list[RefusedRequest], tuple[int | str, ...] | None]:
            filtered, end = _of_refusals(connection, query, of_tenant), None
            # The first filter and the time are read along an index.
            conditions = filtered[:1] + between(refusals.c.at_us, query.since, query.until)
            if last is not None:
                conditions.append(beyond(order, last, newest_first=True))
            if len(filtered) > 1 and (end := end_of_scan(connection, order, conditions)) is not None:
                conditions.append(~beyond(order, end, newest_first=True))
            return refusal_store.where(connection, conditions + filtered[1:], most + 1), end

        rows, end = await self._transactions.read(read)
        if of_tenant is not None:
            rows = [row.for_tenant() for row in rows]
        return page_of(rows, most, name, filters, lambda row: (row.at_us, row.request_id), scanned_to=end)


def _of_refusals(connection: Connection, query: RefusalQuery, of_tenant: str | None) -> Conditions:
    """All but the time, most selective first. Raises `Invalid` (impossible value), `NotFound` (name)."""
    conditions: Conditions = []
    columns, tenant = refusals.c, None
    if of_tenant is not None:
        tenant = queries.find_tenant(connection, of_tenant)
    elif query.tenant is not None:
        tenant = queries.find_tenant(connection, text("tenant", query.tenant, MAX_NAME_CHARACTERS))
    if query.request_id is not None:
        conditions.append(columns.request_id == text("request_id", query.request_id, MAX_ID_CHARACTERS))
    if query.key is not None:
        key = text("key", query.key, MAX_NAME_CHARACTERS)
        owner = None if tenant is None else tenant.tenant_id
        conditions.append(columns.key_id == queries.find_key(connection, key, owner).key_id)
    if query.project is not None:
        project = text("project", query.project, MAX_NAME_CHARACTERS)
        conditions.append(columns.project_id == queries.find_project(connection, project, tenant).project_id)
    owned = [] if tenant is None else [columns.tenant_id == tenant.tenant_id]
    limited: Conditions = []
    if query.limit_id is not None:
        limited.append(columns.limit_id == text("limit_id", query.limit_id, MAX_ID_CHARACTERS))
    # A cursor may name the last row that was looked at: for a tenant that must be one of its own.
    conditions += limited + owned if of_tenant is None else owned + limited
    if query.code is not None:
        conditions.append(columns.code == text("code", query.code, MAX_CODE_CHARACTERS))
    if query.model is not None:
        conditions.append(columns.model == text("model", query.model, MAX_MODEL_CHARACTERS))
    if query.tier is not None:
        conditions.append(columns.tier == one_of("tier", query.tier, tuple(Tier)))
    if query.limit_id is not None and of_tenant is not None:  # it may not learn what it is not told
        conditions.append(columns.of_platform.is_(False))
    return conditions


def one_of(field: str, value: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    """Raises `Invalid`."""
    if value not in known:
        raise Invalid(field, f"{value[:40]!r} is not one of {', '.join(known)}")
    return value


def text(field: str, value: str, most: int) -> str:
    """Raises `Invalid`."""
    # PostgreSQL takes no NUL.
    if not value or len(value) > most or not value.isprintable():
        raise Invalid(field, f"needs 1 to {most} printable characters; leave it out for any")
    return value
