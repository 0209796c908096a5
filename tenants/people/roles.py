"""Roles of people, and what each may do."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    OWNER = "owner"
    """May do everything."""
    OPERATOR = "operator"
    """All but people and secrets: makes no key and rotates none."""
    AUDITOR = "auditor"
    """Reads everything and changes nothing."""
    MEMBER = "member"
    """Of named tenants: sees only these; manages their keys, webhooks and limits below the tenant's."""


class Act(StrEnum):
    """What a person may ask for. Reads and changes of one tenant name it."""

    OWN_ACCOUNT = "own_account"
    """One's own password and sessions."""
    READ_TENANT = "read_tenant"
    """A tenant's requests, usage, keys and limits."""
    READ_PLATFORM = "read_platform"
    """What concerns all tenants: prices, policy, servers, the audit."""
    MAKE_KEY = "make_key"
    """Make and rotate keys of a tenant: the answer shows a secret."""
    CHANGE_KEY = "change_key"
    """What a key of a tenant may do, and until when; no secret is shown."""
    REVOKE_KEY = "revoke_key"
    STEER_REQUEST = "steer_request"
    """Cancel a tenant's requests, and move those that wait to another tier."""
    LIMIT_BELOW_TENANT = "limit_below_tenant"
    """Limits of a tenant's projects, keys and end users."""
    CHANGE_WEBHOOK = "change_webhook"
    """Webhooks that receive a tenant's events: the answer shows the secret that signs them."""
    CHANGE_TENANT = "change_tenant"
    """Tenants, their projects and their own limits."""
    CHANGE_PLATFORM = "change_platform"
    """Prices, policy, targets, brakes, servers, the platform's limits."""
    READ_PEOPLE = "read_people"
    CHANGE_PEOPLE = "change_people"


_OF_A_TENANT = frozenset(
    {
        Act.READ_TENANT,
        Act.MAKE_KEY,
        Act.CHANGE_KEY,
        Act.REVOKE_KEY,
        Act.STEER_REQUEST,
        Act.LIMIT_BELOW_TENANT,
        Act.CHANGE_WEBHOOK,
    }
)
"""A member's, in the member's tenants."""
_MAY = {
    Role.OWNER: frozenset(Act),
    Role.OPERATOR: frozenset(Act) - {Act.MAKE_KEY, Act.READ_PEOPLE, Act.CHANGE_PEOPLE},
    Role.AUDITOR: frozenset({Act.OWN_ACCOUNT, Act.READ_TENANT, Act.READ_PLATFORM, Act.READ_PEOPLE}),
    Role.MEMBER: _OF_A_TENANT | {Act.OWN_ACCOUNT},
}


def may(role: Role, tenants: frozenset[str], act: Act, tenant_id: str | None = None) -> bool:
    """`tenants`: ids of a member, who may act on a tenant only where `tenant_id` names one of them."""
    if act not in _MAY[role]:
        return False
    return role is not Role.MEMBER or act is Act.OWN_ACCOUNT or tenant_id in tenants
