"""Admin acts on projects, and their pages."""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import Connection, insert, update

from tenants.admin import validation
from tenants.admin.audit import Actor
from tenants.admin.commands import ProjectCreate
from tenants.admin.cursor import DEFAULT_PAGE, Page, Text, beyond, checked_limit, decode_cursor, page_of
from tenants.admin.transaction import AdminActs, Change, IfMatch, insert_unique
from tenants.directory import queries
from tenants.directory.keys import new_id
from tenants.directory.records import Project, Status, Tenant, from_us
from tenants.errors import Invalid
from tenants.storage import tables

DEFAULT_PROJECT = "default"


class ProjectActs(AdminActs):
    async def create(self, actor: Actor | str, wanted: ProjectCreate) -> Project:
        name = validation.name("name", wanted.name)

        def change(connection: Connection, now_us: int) -> Change[Project]:
            owner = queries.find_tenant(connection, wanted.tenant)
            have = queries.count(connection, tables.projects, tables.projects.c.tenant_id == owner.tenant_id)
            if have >= validation.MAX_PROJECTS_PER_TENANT:
                raise Invalid(
                    "project", f"a tenant has at most {validation.MAX_PROJECTS_PER_TENANT} projects"
                )
            project = insert_project(connection, owner, name, now_us)
            return Change(project, project.project_id, owner.tenant_id, after=project.as_json())

        return await self._transactions.act(actor, "project.create", change)

    async def suspend(
        self,
        actor: Actor | str,
        project: str,
        tenant: str | None = None,
        *,
        now: bool = False,
        if_match: IfMatch = None,
    ) -> Project:
        """As `TenantActs.suspend`, until `resume`. `project` is an id, or with `tenant` a name."""
        return await self._set_status(actor, "project.suspend", project, tenant, "suspended", now, if_match)

    async def resume(
        self, actor: Actor | str, project: str, tenant: str | None = None, *, if_match: IfMatch = None
    ) -> Project:
        return await self._set_status(actor, "project.resume", project, tenant, "active", False, if_match)

    async def all(self, tenant: str | None = None) -> list[Project]:
        def find(connection: Connection) -> list[Project]:
            if tenant is None:
                owners = queries.tenants_where(connection)
            else:
                owners = [queries.find_tenant(connection, tenant)]
            return queries.projects_of(connection, [owner.tenant_id for owner in owners])

        return await self._transactions.read(find)

    async def show(self, project: str, tenant: str | None = None) -> Project:
        """By id, or with `tenant` by name. Raises `NotFound`, `Invalid`."""
        return await self._transactions.read(lambda connection: _find(connection, project, tenant))

    async def page(
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

        rows = await self._transactions.read(look)
        return page_of(rows, most, "projects", filters, lambda project: (project.tenant_id, project.name))

    async def _set_status(
        self,
        actor: Actor | str,
        action: str,
        project: str,
        tenant: str | None,
        status: Status,
        ends_running: bool,
        if_match: IfMatch,
    ) -> Project:
        def change(connection: Connection, now_us: int) -> Change[Project]:
            before = _find(connection, project, tenant)
            after = replace(before, status=status, ends_running=ends_running)
            connection.execute(
                update(tables.projects)
                .where(tables.projects.c.id == before.project_id)
                .values(status=status, ends_running=ends_running)
            )
            return Change(after, after.project_id, after.tenant_id, before.as_json(), after.as_json())

        return await self._transactions.act(actor, action, change, if_match)


def _find(connection: Connection, project: str, tenant: str | None) -> Project:
    owner = None if tenant is None else queries.find_tenant(connection, tenant)
    return queries.find_project(connection, project, owner)


def insert_project(connection: Connection, tenant: Tenant, name: str, now_us: int) -> Project:
    project = Project(new_id("prj"), tenant.tenant_id, name, "active", from_us(now_us))
    statement = insert(tables.projects).values(
        id=project.project_id, tenant_id=tenant.tenant_id, name=name, status="active", created_us=now_us
    )
    insert_unique(connection, statement, "project", name)
    return project
