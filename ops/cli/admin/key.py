"""`fairgate key`: API keys of tenants."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from ops.cli.resource_commands import groups
from tenants.admin.transaction import Transactions
from tenants.directory import queries
from tenants.nouns.project import ProjectCreate
from tenants.resources.keys import CREATE, KEYS
from tenants.resources.resource import ActCall, ActDone

if TYPE_CHECKING:
    from tenants.admin.admin import Admin


async def _create(admin: Admin, call: ActCall) -> ActDone:
    """Makes the project, too, where it is new."""
    tenant, project = call.command.tenant, call.command.project
    if project is not None and not await _has_project(admin.transactions, tenant, project):
        await admin.projects.create(call.actor, ProjectCreate(tenant=tenant, name=project))
    return await CREATE.run(admin, call)


async def _has_project(transactions: Transactions, tenant: str, project: str) -> bool:
    def known(connection: Connection) -> bool:
        owner = queries.find_tenant(connection, tenant)
        there = queries.projects_of(connection, [owner.tenant_id])
        return any(project in (one.name, one.project_id) for one in there)

    return await transactions.read(known)


_ACTS = tuple(replace(act, run=_create) if act is CREATE else act for act in KEYS.acts)
key = groups([replace(KEYS, acts=_ACTS)])["key"]
