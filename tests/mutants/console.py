"""Mutants of the console and of people: who may see and change what."""

from __future__ import annotations

from tests.mutants.mutations import mutations_of

CONSOLE = "tests/integration/test_console.py"
REQUESTS = "tests/integration/test_console_requests.py"
LIVE = "tests/e2e/test_console_live.py"
PAGES = "gateway/console/pages/tenants"
TESTS = "tests/integration/test_console_tenants.py"
MEMBER = f"{TESTS}::test_a_member_helps_himself_below_the_own_tenant_and_nowhere_else"
TWO_EDITS = f"{TESTS}::test_of_two_edits_through_two_gateways_one_wins_and_the_other_sees_both_states"
PEOPLE = "tests/integration/test_people.py"
THROTTLE = "tests/unit/tenants/people/test_throttle.py"
MADE_UP = "tests/integration/test_made_up_noun.py"
DECLARED = "tests/unit/tenants/resources/test_declaration.py"
RECOVERY = "tests/unit/gateway/console/test_recovery_view.py"

CONSOLE_MUTATIONS = mutations_of(
    [
        (
            "gateway/routes/resource_routes.py",
            "resources: an act takes no notice of its condition",
            "        condition = if_match(request) if act.takes_condition else None\n",
            "        condition = None\n",
            f"{MADE_UP}::test_its_acts_rows_file_and_audit",
        ),
        (
            "tenants/fields.py",
            "resources: a secret is shown",
            " if not _declared(hint)[0].is_secret}",
            "}",
            f"{MADE_UP}::test_its_acts_rows_file_and_audit",
        ),
        (
            "tenants/resources/resource.py",
            "resources: an act without a scope is served",
            "if scope not in SCOPES]",
            "if scope is None]",
            f"{DECLARED}::test_a_list_or_an_act_without_a_scope_that_there_is_fails",
        ),
        (
            "gateway/console/resource_pages.py",
            "resources: of two forms the later wins unseen",
            "        condition = if_match(visit.form) if reference else None\n",
            "        condition = None\n",
            f"{MADE_UP}::test_its_pages",
        ),
        (
            "tenants/config_file/parts.py",
            "config file: what a section says to be absent stays",
            "            if before is not None:\n",
            "            if before is None:\n",
            f"{MADE_UP}::test_its_acts_rows_file_and_audit",
        ),
        (
            "gateway/console/access.py",
            "console: a form of another site is taken",
            'if is_form and headers_of(connection.scope).get("sec-fetch-site", "same-origin") != "same-origin":',
            "if False:",
            f"{CONSOLE}::test_a_form_token_of_another_session_or_site_is_refused",
        ),
        (
            "gateway/console/access.py",
            "console: a token of another session is taken",
            "    if is_form and not hmac.compare_digest(",
            "    if is_form and TOKEN_FIELD not in visit.form and not hmac.compare_digest(",
            f"{CONSOLE}::test_a_form_token_of_another_session_or_site_is_refused",
        ),
        (
            "gateway/console/cookies.py",
            "console: anyone says that a client speaks https",
            "if address is None or not is_within(address, tuple(trusted)):",
            "if address is None:",
            f"{CONSOLE}::test_cookies_are_hidden_from_scripts_and_behind_tls_bound_to_this_host",
        ),
        (
            "tenants/admin/transaction.py",
            "console: who lost the role meanwhile acts on",
            "if actor.person is not None and not rows.is_as_it_was",
            "if False and not rows.is_as_it_was",
            f"{CONSOLE}::test_an_act_of_a_person_whose_role_was_taken_meanwhile_is_not_done",
        ),
        (
            "gateway/console/pages/requests/request.py",
            "console: a member sees another tenant's request",
            "    if not person.may(Act.READ_TENANT, tenant_id):",
            "    if False:",
            f"{REQUESTS}::test_members_see_their_tenants_alone",
        ),
        (
            "gateway/console/pages/filters.py",
            "console: a member's list is of the tenant in the address",
            "    tenant = await tenant_shown(request, wanted or names[0])",
            (
                "    if wanted:\n        return TenantScope(wanted, wanted, names)\n"
                "    tenant = await tenant_shown(request, names[0])"
            ),
            f"{REQUESTS}::test_members_see_their_tenants_alone",
        ),
        (
            "gateway/console/rendering.py",
            "console: what was typed is markup",
            "autoescape=True",
            "autoescape=False",
            f"{CONSOLE}::test_what_is_typed_is_shown_as_text",
        ),
        (
            "gateway/console/pages/live/waiting.py",
            "console: a member sees what waits of all tenants",
            "    tenants = own_tenants(person)\n",
            "    tenants = None if not typed else own_tenants(person)\n",
            f"{LIVE}::test_a_member_sees_the_own_tenants_requests_alone_also_in_the_stream",
        ),
        (
            "gateway/console/live/stream.py",
            "console: a stream outlives its session",
            "                    if not await _is_open(request, session):",
            "                    if False:",
            f"{LIVE}::test_a_stream_ends_with_its_session_and_says_so",
        ),
        (
            f"{PAGES}/limit.py",
            "tenants' pages: a member changes the tenant's own limit",
            (
                "    if to_change and not visit_of(request).person.may(act_on(view.limit.kind), owner.tenant_id):\n"
                "        raise NotForThisRole\n"
            ),
            "",
            MEMBER,
        ),
        (
            "gateway/console/pages/tenant_parts/key_form.py",
            "tenants' pages: a member makes a key of the admin API",
            "    if not is_owner and not OWNERS_SCOPES.isdisjoint(scopes):",
            "    if False:",
            MEMBER,
        ),
        (
            f"{PAGES}/key.py",
            "tenants' pages: another tenant's key gets a new secret",
            "    if api_key.tenant_id != owner.tenant_id:",
            "    if False:",
            MEMBER,
        ),
        (
            f"{PAGES}/limit.py",
            "tenants' pages: another tenant's limit is changed",
            "    if view.limit.tenant_id != owner.tenant_id:",
            "    if False:",
            MEMBER,
        ),
        (
            f"{PAGES}/hygiene.py",
            "tenants' pages: a member lists every tenant's keys",
            "only = own_tenants(visit_of(request).person)",
            "only = None",
            MEMBER,
        ),
        (
            f"{PAGES}/change.py",
            "tenants' pages: the later of two edits wins",
            "if_match=if_match(visit.form)",
            "if_match=None",
            TWO_EDITS,
        ),
        (
            "tenants/people/store.py",
            "people: a person who has changed since is let in",
            "if not now or now[0] != person or person.status",
            "if not now or person.status",
            f"{PEOPLE}::test_a_change_of_the_person_while_a_log_in_is_under_way_wins",
        ),
        (
            "tenants/people/way_in.py",
            "people: a suspended person logs in",
            ' or credentials.person.status != "active"',
            "",
            f"{PEOPLE}::test_a_suspended_person_is_refused_by_the_way_in_itself",
        ),
        (
            "tenants/people/throttle.py",
            "people: one good log-in opens its address",
            "        self._names.forget(name[:MAX_KEY_CHARS])\n        self._addresses.take_back(",
            "        self._names.forget(name[:MAX_KEY_CHARS])\n        self._addresses.forget(",
            THROTTLE,
        ),
        (
            "tenants/people/roles.py",
            "people: a member sees every tenant",
            " or tenant_id in tenants",
            " or tenant_id is not None",
            "tests/unit/tenants/people/test_roles.py",
        ),
        (
            "tenants/admin/people.py",
            "people: the last owner goes",
            "            _keep_an_owner(connection, before, after)\n",
            "",
            f"{PEOPLE}::test_the_last_owner_stays",
        ),
        (
            "tenants/admin/people.py",
            "people: a link is good after its day",
            ".where(table.c.digest == digest_of(token), table.c.expires_us > now_us)",
            ".where(table.c.digest == digest_of(token))",
            f"{PEOPLE}::test_a_link_ends_after_a_day_and_two_who_open_it_at_once_make_one_password",
        ),
        (
            "gateway/console/pages/money/usage.py",
            "money: a member asks about any tenant",
            'return (await tenant_shown(request, asked["tenant"])).tenant_id',
            'return asked["tenant"]',
            "tests/e2e/test_console_money.py::test_a_member_sees_the_own_tenants_alone",
        ),
        (
            "gateway/console/pages/money/recovery.py",
            "money: reservations are charged with time that others used",
            "return min(idle_us, round(unused_tokens * busy_us / served.all_tokens))",
            "return round(unused_tokens * busy_us / served.all_tokens)",
            (
                f"{RECOVERY}::"
                "test_what_reservations_left_unused_is_told_by_the_hour_and_within_the_time_that_engines_waited"
            ),
        ),
        (
            "tenants/counts/minute_store.py",
            "money: each gateway's account of an engine counts",
            "query = select(*keys, *sums).where(ranked.c.place == 1)",
            "query = select(*keys, *sums)",
            (
                "tests/integration/test_engine_time.py::"
                "test_of_several_gateways_the_one_that_saw_a_replica_longest_counts_minute_by_minute"
            ),
        ),
        (
            "ops/settings/shown.py",
            "money: the page of settings shows secrets",
            "    if row.secret:\n",
            "    if False:\n",
            (
                "tests/unit/ops/settings/test_shown.py::"
                "test_each_setting_says_what_set_it_and_secrets_only_that_they_are_set"
            ),
        ),
    ]
)
