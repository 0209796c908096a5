"""Admin acts on tenants, and their pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, func, insert, update

from tenants.admin import validation
from tenants.admin.audit import Actor
from tenants.admin.commands import TenantChange, TenantCreate
from tenants.admin.cursor import DEFAULT_PAGE, Page, Text, beyond, checked_limit, decode_cursor, page_of
from tenants.admin.drafts import changed_tenant, new_tenant
from tenants.admin.projects import DEFAULT_PROJECT, insert_project
from tenants.admin.transaction import AdminActs, Change, IfMatch, insert_unique
from tenants.directory import queries
from tenants.directory.keys import new_id
from tenants.directory.records import ApiKey, Project, Tenant, from_us, tier_names
from tenants.errors import Invalid
from tenants.nouns.limit import limit_as_json
from tenants.storage import tables
from tenants.types import Limit


@dataclass(frozen=True, slots=True)
class TenantView:
    tenant: Tenant
    projects: tuple[Project, ...]
    keys: tuple[ApiKey, ...]
    limits: tuple[Limit, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            **self.tenant.as_json(),
            "projects": [project.as_json() for project in self.projects],
            "keys": [key.as_json() for key in self.keys],
            "limits": [limit_as_json(limit) for limit in self.limits],
            "has_limits": bool(self.limits),
        }


class TenantActs(AdminActs):
    async def create(
        self, actor: Actor | str, wanted: TenantCreate, models: Iterable[str] | None = None
    ) -> Tenant:
        """Creates a tenant with a project `default`. `tiers` None: `tier` and the ones served after it."""
        draft = new_tenant(wanted, models)

        def change(connection: Connection, now_us: int) -> Change[Tenant]:
            if queries.count(connection, tables.tenants) >= validation.MAX_TENANTS:
                raise Invalid(
                    "tenant", f"there are {validation.MAX_TENANTS} tenants already, which is the most"
                )
            tenant = replace(draft, tenant_id=new_id("ten"), created_at=from_us(now_us))
            insert_unique(
                connection,
                insert(tables.tenants).values(
                    id=tenant.tenant_id, revision=0, created_us=now_us, **_columns(tenant)
                ),
                "tenant",
                tenant.name,
            )
            insert_project(connection, tenant, DEFAULT_PROJECT, now_us)
            return Change(tenant, tenant.tenant_id, tenant.tenant_id, after=tenant.as_json())

        return await self._transactions.act(actor, "tenant.create", change)

    async def update(
        self, actor: Actor | str, tenant: str, wanted: TenantChange, *, if_match: IfMatch = None
    ) -> Tenant:
        """Changes the given fields. A new `tier` without `tiers` sets those to it and the ones after it."""
        return await self._edit(
            actor, "tenant.update", tenant, lambda before: changed_tenant(before, wanted), if_match
        )

    async def suspend(
        self, actor: Actor | str, tenant: str, *, now: bool = False, if_match: IfMatch = None
    ) -> Tenant:
        """Its keys are refused until `resume`, and its waiting requests end; running ones finish, or
        with `now` end as well, charged for what they emitted."""
        return await self._edit(
            actor,
            "tenant.suspend",
            tenant,
            lambda before: replace(before, status="suspended", ends_running=now),
            if_match,
        )

    async def resume(self, actor: Actor | str, tenant: str, *, if_match: IfMatch = None) -> Tenant:
        return await self._edit(
            actor,
            "tenant.resume",
            tenant,
            lambda before: replace(before, status="active", ends_running=False),
            if_match,
        )

    async def all(self) -> list[Tenant]:
        return await self._transactions.read(queries.tenants_where)

    async def show(self, tenant: str) -> TenantView:
        def view(connection: Connection) -> TenantView:
            found = queries.find_tenant(connection, tenant)
            ids = [found.tenant_id]
            return TenantView(
                found,
                tuple(queries.projects_of(connection, ids)),
                tuple(queries.keys_of(connection, ids)),
                tuple(queries.limits_of(connection, ids)),
            )

        return await self._transactions.read(view)

    async def page(
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
        rows = await self._transactions.read(lambda one: queries.tenants_where(one, *wanted, most=most + 1))
        return page_of(rows, most, "tenants", filters, lambda row: (row.name,))

    async def _edit(
        self,
        actor: Actor | str,
        action: str,
        reference: str,
        edit: Callable[[Tenant], Tenant],
        if_match: IfMatch,
    ) -> Tenant:
        def change(connection: Connection, now_us: int) -> Change[Tenant]:
            before = queries.find_tenant(connection, reference)
            after = edit(before)
            connection.execute(
                update(tables.tenants)
                .where(tables.tenants.c.id == before.tenant_id)
                .values(**_columns(after))
            )
            return Change(after, after.tenant_id, after.tenant_id, before.as_json(), after.as_json())

        return await self._transactions.act(actor, action, change, if_match)


def _columns(tenant: Tenant) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "status": tenant.status,
        "weight": tenant.weight,
        "default_tier": tenant.default_tier.value,
        "tiers": tier_names(tenant.tiers),
        "models": None if tenant.models is None else sorted(tenant.models),
        "on_low_budget": tenant.on_low_budget.value,
        "reserved_tokens_per_s": tenant.reserved_tokens_per_s,
        "reserved_tier": None if tenant.reserved_tier is None else tenant.reserved_tier.value,
        "labels": {key: list(values) for key, values in tenant.labels.items()} or None,
        "ends_running": tenant.ends_running,
    }
