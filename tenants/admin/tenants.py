"""Admin acts on tenants and their projects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, insert

from tenants.admin.audit import Actor
from tenants.admin.record_acts import SuspendableActs
from tenants.admin.transaction import Change, IfMatch, insert_unique
from tenants.directory import queries
from tenants.directory.keys import new_id
from tenants.errors import Invalid
from tenants.instants import from_us
from tenants.nouns import checks
from tenants.nouns.key import ApiKey
from tenants.nouns.limit import limit_as_json
from tenants.nouns.project import DEFAULT_PROJECT, MAX_PROJECTS_PER_TENANT, Project, ProjectCreate
from tenants.nouns.tenant import (
    MAX_TENANTS,
    Tenant,
    TenantChange,
    TenantCreate,
    changed_tenant,
    new_tenant,
)
from tenants.storage import tables
from tenants.types import Limit


@dataclass(frozen=True, slots=True)
class TenantView:
    """A tenant with what belongs to it."""

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


def view(connection: Connection, reference: str) -> TenantView:
    """By id or name. Raises `NotFound`."""
    found = queries.find_tenant(connection, reference)
    ids = [found.tenant_id]
    return TenantView(
        found,
        tuple(queries.projects_of(connection, ids)),
        tuple(queries.keys_of(connection, ids)),
        tuple(queries.limits_of(connection, ids)),
    )


class TenantActs(SuspendableActs[Tenant]):
    kind = "tenant"
    table = tables.tenants

    def find(self, connection: Connection, reference: str, tenant: str | None = None) -> Tenant:
        return queries.find_tenant(connection, reference)

    async def create(
        self, actor: Actor | str, wanted: TenantCreate, models: Iterable[str] | None = None
    ) -> Tenant:
        """Creates a tenant with a project `default`. `tiers` None: `tier` and the ones served after it."""
        draft = new_tenant(wanted, models)

        def change(connection: Connection, now_us: int) -> Change[Tenant]:
            if queries.count(connection, tables.tenants) >= MAX_TENANTS:
                raise Invalid("tenant", f"the limit of {MAX_TENANTS} tenants is reached")
            tenant = replace(draft, tenant_id=new_id("ten"), created_at=from_us(now_us))
            insert_unique(
                connection,
                insert(tables.tenants).values(revision=0, **tenant.as_row()),
                "tenant",
                tenant.name,
            )
            insert_project(connection, tenant, DEFAULT_PROJECT, now_us)
            return Change(tenant, tenant.tenant_id, tenant.tenant_id, after=tenant.as_json())

        return await self._transactions.act(actor, "tenant.create", change)

    async def update(
        self,
        actor: Actor | str,
        reference: str,
        wanted: TenantChange,
        tenant: str | None = None,
        *,
        if_match: IfMatch = None,
    ) -> Tenant:
        """Changes the given fields. A new `tier` without `tiers` sets those to it and the ones after it."""

        def edit(connection: Connection, before: Tenant, now_us: int) -> Tenant:
            return changed_tenant(before, wanted)

        return await self._edit(actor, "update", reference, tenant, edit, if_match)

    async def all(self) -> list[Tenant]:
        return await self._transactions.read(queries.tenants_where)

    async def show(self, tenant: str) -> TenantView:
        return await self._transactions.read(lambda connection: view(connection, tenant))


class ProjectActs(SuspendableActs[Project]):
    kind = "project"
    table = tables.projects

    async def create(self, actor: Actor | str, wanted: ProjectCreate) -> Project:
        name = checks.name("name", wanted.name)

        def change(connection: Connection, now_us: int) -> Change[Project]:
            owner = queries.find_tenant(connection, wanted.tenant)
            have = queries.count(connection, tables.projects, tables.projects.c.tenant_id == owner.tenant_id)
            if have >= MAX_PROJECTS_PER_TENANT:
                raise Invalid("project", f"a tenant has at most {MAX_PROJECTS_PER_TENANT} projects")
            project = insert_project(connection, owner, name, now_us)
            return Change(project, project.project_id, owner.tenant_id, after=project.as_json())

        return await self._transactions.act(actor, "project.create", change)

    def find(self, connection: Connection, reference: str, tenant: str | None = None) -> Project:
        return find_project(connection, reference, tenant)

    async def show(self, project: str, tenant: str | None = None) -> Project:
        return await self._transactions.read(lambda connection: find_project(connection, project, tenant))


def find_project(connection: Connection, project: str, tenant: str | None) -> Project:
    """By id, or with `tenant` by name. Raises `NotFound`, `Invalid`."""
    owner = None if tenant is None else queries.find_tenant(connection, tenant)
    return queries.find_project(connection, project, owner)


def insert_project(connection: Connection, tenant: Tenant, name: str, now_us: int) -> Project:
    project = Project(new_id("prj"), tenant.tenant_id, name, "active", from_us(now_us))
    insert_unique(connection, insert(tables.projects).values(**project.as_row()), "project", name)
    return project
