"""Pages of the directory's objects: tenants, projects, keys, limits, targets, prices; and one of each.

Every list is read in the order of an index."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection, func, not_

from tenants.admin import validation
from tenants.admin.cursor import (
    DEFAULT_PAGE,
    Number,
    Page,
    Text,
    beyond,
    checked_limit,
    decode_cursor,
    page_of,
)
from tenants.admin.limits import LimitCommands, LimitView, newest_window
from tenants.admin.lists import key_hygiene
from tenants.admin.lists.key_hygiene import KeyFinding
from tenants.admin.lists.scans import end_of_scan
from tenants.admin.prices import PriceCommands, PriceRow
from tenants.directory import key_uses, queries
from tenants.directory.records import ApiKey, Project, Tenant, from_us, to_us
from tenants.errors import NotFound
from tenants.quota import alerts as limit_events
from tenants.slo import store as slo_store
from tenants.slo.slo import Slo
from tenants.storage import tables
from tenants.types import Tier


class ObjectLists(LimitCommands, PriceCommands):
    async def page_tenants(
        self,
        *,
        search: str | None = None,
        only: frozenset[str] | None = None,
        cursor: str | None = None,
        limit: int = DEFAULT_PAGE,
    ) -> Page[Tenant]:
        """By name. `search`: part of it, in any case; `only`: of these ids. Raises `Invalid`."""
        most, filters = checked_limit(limit), {"search": search}
        name = tables.tenants.c.name
        last = None if cursor is None else decode_cursor("tenants", filters, cursor, tuple[Text])
        wanted = [] if last is None else [beyond([name], last)]
        if search is not None:
            text = validation.plain_text("search", search).lower()
            wanted.append(func.lower(name).contains(text, autoescape=True))
        if only is not None:
            wanted.append(tables.tenants.c.id.in_(sorted(only)))
        rows = await self._database.read(lambda one: queries.tenants_where(one, *wanted, most=most + 1))
        return page_of(rows, most, "tenants", filters, lambda row: (row.name,))

    async def page_projects(
        self, tenant: str | None = None, *, cursor: str | None = None, limit: int = DEFAULT_PAGE
    ) -> Page[Project]:
        """Projects of one tenant, or of all, by tenant's id and name. Raises `Invalid`, `NotFound`."""
        most, filters = checked_limit(limit), {"tenant": tenant}
        columns = (tables.projects.c.tenant_id, tables.projects.c.name)
        last = None if cursor is None else decode_cursor("projects", filters, cursor, tuple[Text, Text])

        def look(connection: Connection) -> list[Project]:
            wanted = [] if last is None else [beyond(columns, last)]
            if tenant is not None:
                wanted.append(columns[0] == queries.find_tenant(connection, tenant).tenant_id)
            return queries.projects_where(connection, *wanted, most=most + 1)

        rows = await self._database.read(look)
        return page_of(rows, most, "projects", filters, lambda project: (project.tenant_id, project.name))

    async def page_keys(
        self,
        tenant: str | None = None,
        *,
        finding: KeyFinding | None = None,
        only: frozenset[str] | None = None,
        cursor: str | None = None,
        limit: int = DEFAULT_PAGE,
    ) -> Page[ApiKey]:
        """In order of creation, revoked ones included. `finding`: working keys with it, looked for in a
        bounded number of keys a page; `only`: of these tenants (ids). Raises `Invalid`, `NotFound`."""
        most, filters = checked_limit(limit), {"tenant": tenant, "finding": finding}
        table, now = tables.api_keys, from_us(round(self._clock() * 1e6))
        order = (table.c.created_us, table.c.id)
        last = None if cursor is None else decode_cursor("keys", filters, cursor, tuple[Number, Text])

        def look(connection: Connection) -> tuple[list[ApiKey], tuple[int | str, ...] | None]:
            wanted = [] if last is None else [beyond(order, last)]
            if tenant is not None:
                wanted.append(table.c.tenant_id == queries.find_tenant(connection, tenant).tenant_id)
            if only is not None:
                wanted.append(table.c.tenant_id.in_(sorted(only)))
            end = None
            if finding is not None:
                end = end_of_scan(connection, order, wanted, newest_first=False)
                wanted.append(key_hygiene.condition(finding, now))
                if end is not None:
                    wanted.append(not_(beyond(order, end)))
            return queries.keys_where(connection, *wanted, most=most + 1), end

        rows, end = await self._database.read(look)
        return page_of(
            rows,
            most,
            "keys",
            filters,
            lambda key: (to_us(key.created_at), key.key_id),
            scanned_to=end,
        )

    async def last_uses(self, keys: Sequence[ApiKey]) -> dict[str, datetime]:
        """By id; keys that were never used are left out."""
        key_ids = [key.key_id for key in keys]
        used_us = await self._database.read(lambda connection: key_uses.last_uses(connection, key_ids))
        return {key_id: from_us(at_us) for key_id, at_us in used_us.items()}

    async def page_limits(
        self, tenant: str | None = None, *, cursor: str | None = None, limit: int = DEFAULT_PAGE
    ) -> Page[LimitView]:
        """In order of creation, as in force, with each one's newest events. Raises `Invalid`, `NotFound`."""
        most, filters = checked_limit(limit), {"tenant": tenant}
        table = tables.limits
        last = None if cursor is None else decode_cursor("limits", filters, cursor, tuple[Number, Text])

        def look(connection: Connection) -> list[LimitView]:
            wanted = [] if last is None else [beyond((table.c.created_us, table.c.id), last)]
            if tenant is not None:
                wanted.append(table.c.tenant_id == queries.find_tenant(connection, tenant).tenant_id)
            rows = queries.limits_where(connection, *wanted, most=most + 1)
            events = limit_events.events_of(connection, [limit.limit_id for limit in rows])
            return [self._view(limit, newest_window(events.get(limit.limit_id, []))) for limit in rows]

        views = await self._database.read(look)
        return page_of(
            views, most, "limits", filters, lambda view: (view.limit.created_us, view.limit.limit_id)
        )

    async def page_slos(
        self, tenant: str | None = None, *, cursor: str | None = None, limit: int = DEFAULT_PAGE
    ) -> Page[Slo]:
        """By tenant, tier and metric: all, or those that bind one tenant. Raises `Invalid`, `NotFound`."""
        most, filters = checked_limit(limit), {"tenant": tenant}
        table = tables.slos
        columns = (table.c.tenant_id, table.c.tier, table.c.metric)
        last = None if cursor is None else decode_cursor("slos", filters, cursor, tuple[Text, Text, Text])

        def look(connection: Connection) -> list[Slo]:
            wanted = [] if last is None else [beyond(columns, last)]
            if tenant is None:
                return slo_store.slos_where(connection, *wanted, most=most + 1)
            tenant_id = queries.find_tenant(connection, tenant).tenant_id
            binding = sorted(slo_store.binding(connection, tenant_id), key=_slo_key)
            return [slo for slo in binding if last is None or _slo_key(slo) > last]

        rows = await self._database.read(look)
        return page_of(rows, most, "slos", filters, _slo_key)

    async def page_prices(
        self, model: str | None = None, *, cursor: str | None = None, limit: int = DEFAULT_PAGE
    ) -> Page[PriceRow]:
        """Prices in force by model and tier, of one model or of all. Raises `Invalid`."""
        most, filters = checked_limit(limit), {"model": model}
        last = None if cursor is None else decode_cursor("prices", filters, cursor, tuple[Text, Number])
        rows = sorted((row for row in await self.list_prices() if model in (None, row.model)), key=_price_key)
        left = [row for row in rows if last is None or _price_key(row) > last]
        return page_of(left, most, "prices", filters, _price_key)

    async def show_key(self, key: str) -> ApiKey:
        return await self._database.read(lambda connection: queries.find_key(connection, key))

    async def show_project(self, project: str, tenant: str | None = None) -> Project:
        """By id, or with `tenant` by name. Raises `NotFound`, `Invalid`."""

        def look(connection: Connection) -> Project:
            owner = None if tenant is None else queries.find_tenant(connection, tenant)
            return queries.find_project(connection, project, owner)

        return await self._database.read(look)

    async def show_slo(self, slo_id: str) -> Slo:
        is_it = tables.slos.c.id == queries.plain(slo_id)
        rows = await self._database.read(lambda one: slo_store.slos_where(one, is_it))
        if not rows:
            raise NotFound("slo", slo_id[:80])
        return rows[0]


def _slo_key(slo: Slo) -> tuple[str, str, str]:
    return slo.tenant_id, slo.tier.value, slo.metric


def _price_key(row: PriceRow) -> tuple[str, int]:
    return row.model, list(Tier).index(row.tier)
