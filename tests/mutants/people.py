"""Mutants of people and their sessions, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

PEOPLE = "tests/integration/test_people.py"
THROTTLE = "tests/unit/tenants/people/test_throttle.py"

_BROKEN: list[Broken] = [
    (
        "tenants/people/rows.py",
        "a change of the person leaves a log-in under way valid",
        "        person_sessions.c.person_revision == people.c.revision,\n",
        "",
        f"{PEOPLE}::test_a_change_made_elsewhere_beside_a_log_in_ends_its_session",
    ),
    (
        "tenants/people/rows.py",
        "an idle session goes on",
        "        person_sessions.c.seen_us > now_us - round(rules.idle_s * 1e6),\n",
        "",
        f"{PEOPLE}::test_sessions_end_idle_and_absolutely",
    ),
    (
        "tenants/people/store.py",
        "a person who has changed since is let in",
        "if not now or now[0] != person or person.status",
        "if not now or person.status",
        f"{PEOPLE}::test_a_change_of_the_person_while_a_log_in_is_under_way_wins",
    ),
    (
        "tenants/people/way_in.py",
        "an unknown name is refused without work",
        "            checked = stored or NO_PASSWORD\n",
        "            if not stored:\n                raise LogInRefused\n            checked = stored\n",
        f"{PEOPLE}::test_unknown_suspended_invited_and_wrong_are_told_apart_by_nothing",
    ),
    (
        "tenants/people/way_in.py",
        "a suspended person logs in",
        ' or found.person.status != "active"',
        "",
        f"{PEOPLE}::test_a_suspended_person_is_refused_by_the_way_in_itself",
    ),
    (
        "tenants/people/hashing_gate.py",
        "any number of hashes at a time",
        "max_workers=at_once",
        "max_workers=64",
        "tests/unit/tenants/people/test_hashing_gate.py",
    ),
    (
        "tenants/people/hashing_gate.py",
        "the line for hashes has no end",
        "if self.inside >= self._most:",
        "if self.inside < 0:",
        "tests/unit/tenants/people/test_hashing_gate.py",
    ),
    (
        "tenants/people/throttle.py",
        "one good log-in opens its address",
        "        self._names.forget(name[:MAX_KEY_CHARS])\n        self._addresses.take_back(",
        "        self._names.forget(name[:MAX_KEY_CHARS])\n        self._addresses.forget(",
        THROTTLE,
    ),
    (
        "tenants/people/throttle.py",
        "a flood of names frees a name under attack",
        "key=lambda key: (kept[key].count, kept[key].last_s)",
        "key=lambda key: kept[key].last_s",
        THROTTLE,
    ),
    (
        "tenants/people/roles.py",
        "a member sees every tenant",
        " or tenant_id in tenants",
        " or tenant_id is not None",
        "tests/unit/tenants/people/test_roles.py",
    ),
    (
        "tenants/admin/people.py",
        "the last owner goes",
        "            _keep_an_owner(connection, before, after)\n",
        "",
        f"{PEOPLE}::test_the_last_owner_stays",
    ),
    (
        "tenants/admin/people.py",
        "a set-up link works beside an owner",
        "    if not rows.needs_owner(connection):\n",
        "    if False:\n",
        f"{PEOPLE}::test_a_newer_set_up_link_replaces_the_older_and_none_works_beside_an_owner",
    ),
    (
        "tenants/admin/people.py",
        "a link is good after its day",
        ".where(table.c.digest == digest_of(token), table.c.expires_us > now_us)",
        ".where(table.c.digest == digest_of(token))",
        f"{PEOPLE}::test_a_link_ends_after_a_day_and_two_who_open_it_at_once_make_one_password",
    ),
]

PEOPLE_MUTATIONS = mutations_of("people", _BROKEN)
