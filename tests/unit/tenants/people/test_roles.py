"""What each role may do: the whole table, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tenants.people.person import Person
from tenants.people.roles import Act, Role, may

OWNER, OPERATOR, AUDITOR, MEMBER = Role
TABLE: dict[Act, set[Role]] = {
    Act.OWN_ACCOUNT: {OWNER, OPERATOR, AUDITOR, MEMBER},
    Act.READ_TENANT: {OWNER, OPERATOR, AUDITOR, MEMBER},
    Act.READ_PLATFORM: {OWNER, OPERATOR, AUDITOR},
    Act.MAKE_KEY: {OWNER, MEMBER},
    Act.CHANGE_KEY: {OWNER, OPERATOR, MEMBER},
    Act.REVOKE_KEY: {OWNER, OPERATOR, MEMBER},
    Act.STEER_REQUEST: {OWNER, OPERATOR, MEMBER},
    Act.LIMIT_BELOW_TENANT: {OWNER, OPERATOR, MEMBER},
    Act.CHANGE_WEBHOOK: {OWNER, OPERATOR, MEMBER},
    Act.CHANGE_TENANT: {OWNER, OPERATOR},
    Act.CHANGE_PLATFORM: {OWNER, OPERATOR},
    Act.READ_PEOPLE: {OWNER, AUDITOR},
    Act.CHANGE_PEOPLE: {OWNER},
}
TENANTS = frozenset({"ten_own"})


@pytest.mark.parametrize("act", Act)
def test_each_act_is_for_these_roles_alone(act: Act) -> None:
    assert {role for role in Role if may(role, TENANTS, act, "ten_own")} == TABLE[act]


@pytest.mark.parametrize("act", [act for act in Act if act is not Act.OWN_ACCOUNT])
@pytest.mark.parametrize("tenant_id", ["ten_other", "", None])
def test_a_member_does_nothing_in_another_tenant_nor_where_none_is_named(
    act: Act, tenant_id: str | None
) -> None:
    assert not may(Role.MEMBER, TENANTS, act, tenant_id)


def test_no_tenant_is_seen_by_a_member_of_none() -> None:
    assert not may(Role.MEMBER, frozenset(), Act.READ_TENANT, None)
    assert not may(Role.MEMBER, frozenset(), Act.READ_TENANT, "")


def test_a_suspended_person_may_nothing() -> None:
    person = Person("psn_1", "ada", Role.OWNER, frozenset(), "active", True, 1, 0)
    assert all(person.may(act) for act in Act)
    assert not any(replace(person, status="suspended").may(act) for act in Act)
