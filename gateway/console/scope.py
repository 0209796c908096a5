"""Which tenants a page may show to a person."""

from __future__ import annotations

from typing import Any

from litestar import Request

from gateway.console.access import NotForThisRole, visit_of
from gateway.routes.context import gateway_of
from tenants.directory import queries
from tenants.directory.records import Tenant
from tenants.errors import NotFound
from tenants.people.person import Person
from tenants.people.roles import Act


def own_tenants(person: Person) -> frozenset[str] | None:
    """Ids of the tenants that the person sees; None: all."""
    return None if person.may(Act.READ_PLATFORM) else person.tenants


async def tenant_shown(request: Request[Any, Any, Any], wanted: str, act: Act = Act.READ_TENANT) -> Tenant:
    """The tenant by name or id. Raises `NotFound` if it does not exist or the person may not see it, and
    `NotForThisRole` if the person may see it but not do `act`."""
    person = visit_of(request).person
    database = gateway_of(request).deps.database
    owner = await database.read(lambda connection: queries.find_tenant(connection, wanted))
    if not person.may(Act.READ_TENANT, owner.tenant_id):
        raise NotFound("tenant", wanted)
    if not person.may(act, owner.tenant_id):
        raise NotForThisRole
    return owner
