"""Mutants of the console's pages, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

CONSOLE = "tests/integration/test_console.py"
REQUESTS = "tests/integration/test_console_requests.py"
LIVE_PAGES = "tests/unit/gateway/console/test_live_pages.py"
LIVE = "tests/e2e/test_console_live.py"

_BROKEN: list[Broken] = [
    (
        "gateway/console/live/hub.py",
        "no live page is kept for owners",
        "kept = 0 if person.role is Role.OWNER else OWNERS_PART",
        "kept = 0",
        "tests/unit/gateway/console/test_live_hub.py"
        "::test_one_person_has_so_many_places_and_owners_have_some_that_no_other_takes",
    ),
    (
        "gateway/console/access.py",
        "a form of another site is taken",
        'if is_form and headers_of(connection.scope).get("sec-fetch-site", "same-origin") != "same-origin":',
        "if False:",
        f"{CONSOLE}::test_a_form_token_of_another_session_or_site_is_refused",
    ),
    (
        "gateway/console/access.py",
        "a token of another session is taken",
        "    if is_form and not hmac.compare_digest(",
        "    if is_form and TOKEN_FIELD not in visit.form and not hmac.compare_digest(",
        f"{CONSOLE}::test_a_form_token_of_another_session_or_site_is_refused",
    ),
    (
        "gateway/console/return_path.py",
        "a log-in leads anywhere",
        "return wanted if is_below and is_plain and is_direct",
        "return wanted if is_plain and is_direct",
        f"{CONSOLE}::test_a_log_in_leads_nowhere_else",
    ),
    (
        "gateway/console/cookies.py",
        "anyone says that a client speaks https",
        "if address is None or not is_within(address, tuple(trusted)):",
        "if address is None:",
        f"{CONSOLE}::test_cookies_are_hidden_from_scripts_and_behind_tls_bound_to_this_host",
    ),
    (
        "gateway/console/pages/people/person.py",
        "acts on people ask for no password",
        "        await deps.way_in.confirm(visit.person, "
        'visit.form.get(asked_in, ""), address=visit.address)\n',
        "",
        f"{CONSOLE}::test_acts_on_people_ask_for_the_password_and_reach_the_audit",
    ),
    (
        "gateway/console/pages/people/person.py",
        "a page that is out of date undoes what was changed since",
        "visit.actor, person, wanted, if_match=condition)",
        "visit.actor, person, wanted)",
        f"{CONSOLE}::test_a_page_of_a_person_that_was_changed_meanwhile_changes_nothing",
    ),
    (
        "gateway/console/pages/people/people.py",
        "links go by the Host",
        "    if not where:\n",
        "    if True:\n",
        f"{CONSOLE}::test_links_begin_with_the_setting_whatever_the_host_says",
    ),
    (
        "tenants/admin/people.py",
        "a person's page ends the sessions of others",
        "if not found or of not in (None, found[0].person.person_id):",
        "if not found:",
        f"{CONSOLE}::test_an_owner_ends_one_session_of_another_person_and_no_other",
    ),
    (
        "tenants/admin/transaction.py",
        "who lost the role meanwhile acts on",
        "if actor.person is not None and not rows.is_as_it_was",
        "if False and not rows.is_as_it_was",
        f"{CONSOLE}::test_an_act_of_a_person_whose_role_was_taken_meanwhile_is_not_done",
    ),
    (
        "gateway/console/pages/account/log_in.py",
        "a log-in leaves the browser's session before it open",
        "await deps.people.log_out(visit.session)\n    form = unsent_of",
        "pass\n    form = unsent_of",
        f"{CONSOLE}::test_a_log_in_makes_a_new_session_and_ends_the_one_before",
    ),
    (
        "gateway/console/pages/requests/request.py",
        "a member sees another tenant's request",
        "    if not person.may(Act.READ_TENANT, tenant_id):",
        "    if False:",
        f"{REQUESTS}::test_members_see_their_tenants_alone",
    ),
    (
        "gateway/console/pages/requests/filters.py",
        "a member's list is of the tenant in the address",
        "    tenant = await tenant_shown(request, wanted or names[0])",
        "    if wanted:\n        return TenantScope(wanted, wanted, names)\n"
        "    tenant = await tenant_shown(request, names[0])",
        f"{REQUESTS}::test_members_see_their_tenants_alone",
    ),
    (
        "gateway/console/pages/requests/kept_shares.py",
        "a share of few requests is shown",
        "return self.requests >= FEWEST",
        "return self.requests > 0",
        "tests/unit/gateway/console/test_kept_shares.py",
    ),
    (
        "gateway/console/rendering.py",
        "what was typed is markup",
        "autoescape=True",
        "autoescape=False",
        f"{CONSOLE}::test_what_is_typed_is_shown_as_text",
    ),
    (
        "gateway/console/live/hub.py",
        "each page that opens makes a snapshot of its own",
        "            if self.number and clock() - self._made_s < younger_than_s:",
        "            if False:",
        "tests/unit/gateway/console/test_live_hub.py::test_pages_opened_together_share_one_snapshot",
    ),
    (
        "gateway/console/live/held_rows.py",
        "rows that are over leave their places",
        "        rows.append(HeldRow(each if current is None else current, current is None))",
        "        if current is not None:\n            rows.append(HeldRow(current, False))",
        f"{LIVE_PAGES}::test_rows_stay_in_their_places_and_new_ones_are_counted",
    ),
    (
        "gateway/console/pages/live/waiting.py",
        "an auditor reads an operator's text",
        "self._ids = (self._question.may_act, self._question.typed_tenant, *ids)",
        "self._ids = (self._question.typed_tenant, *ids)",
        f"{LIVE_PAGES}::test_a_waiting_request_shows_what_goes_before_it_and_an_auditor_no_buttons",
    ),
    (
        "tenants/people/store.py",
        "a look keeps a session alive",
        "        if is_use and now_us - found[0].seen_us >= round(self.rules.seen_every_s * 1e6):",
        "        if now_us - found[0].seen_us >= round(self.rules.seen_every_s * 1e6):",
        "tests/integration/test_people.py::test_a_look_does_not_keep_a_session_from_ending",
    ),
    (
        "gateway/pools/fleet.py",
        "a gateway of another version breaks the page",
        "        with contextlib.suppress(msgspec.ValidationError):\n            found",
        "        if True:\n            found",
        "tests/integration/test_fleet.py"
        "::test_live_figures_of_all_gateways_are_added_up_and_one_of_another_version_is_missing",
    ),
    (
        "gateway/console/pages/live/waiting.py",
        "a member sees what waits of all tenants",
        "    tenants = own_tenants(person)\n",
        "    tenants = None if not typed else own_tenants(person)\n",
        f"{LIVE}::test_a_member_sees_the_own_tenants_requests_alone_also_in_the_stream",
    ),
    (
        "gateway/console/live/stream.py",
        "a stream outlives its session",
        "                    if not await _is_open(request, session):",
        "                    if False:",
        f"{LIVE}::test_a_stream_ends_with_its_session_and_says_so",
    ),
    (
        "gateway/console/pages/policy/what_if.py",
        "a what-if is applied to what was changed meanwhile",
        "file.plan(wanted, if_match=frozenset({tag}))",
        "file.plan(wanted)",
        "tests/e2e/test_console_policy.py::test_a_what_if_is_that_of_the_command_line_and_can_be_applied",
    ),
    (
        "gateway/console/pages/policy/apply_plan.py",
        "a tenant that is gone comes back by a what-if",
        "        if step.act == CREATES:\n",
        "        if False:\n",
        "tests/unit/gateway/console/test_policy_pages.py",
    ),
]
CONSOLE_MUTATIONS = mutations_of("console", _BROKEN)
