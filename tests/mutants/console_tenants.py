"""Mutants of the console's pages of tenants, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

PAGES = "gateway/console/pages/tenants"
TESTS = "tests/integration/test_console_tenants.py"
MEMBER = f"{TESTS}::test_a_member_helps_himself_below_the_own_tenant_and_nowhere_else"
TWO_EDITS = f"{TESTS}::test_of_two_edits_through_two_gateways_one_wins_and_the_other_sees_both_states"

_BROKEN: list[Broken] = [
    (
        f"{PAGES}/limits.py",
        "a member limits the tenant itself",
        "        if not visit.person.may(act_on(kind_of(visit.form)), found.tenant_id):\n"
        "            raise NotForThisRole\n",
        "",
        MEMBER,
    ),
    (
        f"{PAGES}/limit.py",
        "a member changes the tenant's own limit",
        "    if to_change and not visit_of(request).person.may(act_on(found.limit.kind), owner.tenant_id):\n"
        "        raise NotForThisRole\n",
        "",
        MEMBER,
    ),
    (
        "gateway/console/pages/tenant_parts/key_form.py",
        "a member makes a key of the admin API",
        "    if not is_owner and not OWNERS_SCOPES.isdisjoint(scopes):",
        "    if False:",
        MEMBER,
    ),
    (
        f"{PAGES}/key.py",
        "another tenant's key gets a new secret",
        "    if found.tenant_id != owner.tenant_id:",
        "    if False:",
        MEMBER,
    ),
    (
        f"{PAGES}/limit.py",
        "another tenant's limit is changed",
        "    if found.limit.tenant_id != owner.tenant_id:",
        "    if False:",
        MEMBER,
    ),
    (
        f"{PAGES}/hygiene.py",
        "a member lists every tenant's keys",
        "        only=own_tenants(visit_of(request).person),",
        "        only=None,",
        MEMBER,
    ),
    (
        f"{PAGES}/change.py",
        "the later of two edits wins",
        "if_match=if_match(visit.form)",
        "if_match=None",
        TWO_EDITS,
    ),
    (
        "gateway/console/pages/tenant_parts/key_path.py",
        "the tenant's limits are not on a key's path",
        "        (SubjectKind.TENANT, key.tenant_id),\n",
        "",
        f"{TESTS}::test_a_key_under_a_capped_tenant_is_never_called_unlimited",
    ),
    (
        "tenants/quota/hour_of_week.py",
        "one week is history enough",
        "LEAST_WEEKS = 2",
        "LEAST_WEEKS = 1",
        "tests/unit/tenants/quota/test_hour_of_week.py",
    ),
]
CONSOLE_TENANTS_MUTATIONS = mutations_of("tenants' pages", _BROKEN)
