"""Names of a person's tenants and roles as pages show them."""

from __future__ import annotations

from tenants.directory.directory import Directory
from tenants.people.person import Person
from tenants.people.roles import Role

ROLES = {
    Role.OWNER: "Owner: everything",
    Role.OPERATOR: "Operator: everything except people and secrets",
    Role.AUDITOR: "Auditor: sees everything, changes nothing",
    Role.MEMBER: "Member: only the chosen tenants",
}


def tenant_names(directory: Directory, person: Person) -> list[str]:
    """By name, or by id if a tenant is gone."""
    tenants = [(directory.tenant(tenant_id), tenant_id) for tenant_id in person.tenants]
    return sorted(tenant_id if tenant is None else tenant.name for tenant, tenant_id in tenants)


def names_in(text: str) -> list[str]:
    """Names separated by commas or spaces."""
    return text.replace(",", " ").split()
