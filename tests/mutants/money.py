"""Mutants of the pages of money and of the platform, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

VIEW = "tests/unit/gateway/console/test_usage_view.py"
RECOVERY = "tests/unit/gateway/console/test_recovery_view.py"

_BROKEN: list[Broken] = [
    (
        "gateway/console/pages/money/usage.py",
        "a member asks about any tenant",
        'return (await tenant_shown(request, asked["tenant"])).tenant_id',
        'return asked["tenant"]',
        "tests/e2e/test_console_money.py::test_a_member_sees_the_own_tenants_alone",
    ),
    (
        "gateway/console/pages/money/usage_view.py",
        "a picture leaves small groups out",
        "        place = largest.index(ids) if ids in largest else -1\n",
        "        if ids not in largest:\n            continue\n        place = largest.index(ids)\n",
        f"{VIEW}::test_the_columns_over_time_add_up_to_all_of_it",
    ),
    (
        "gateway/console/pages/money/recovery_view.py",
        "reservations are charged with time that others used",
        "return min(idle_us, round(unused_tokens * busy_us / served.all_tokens))",
        "return round(unused_tokens * busy_us / served.all_tokens)",
        f"{RECOVERY}::"
        "test_what_reservations_left_unused_is_told_by_the_hour_and_within_the_time_that_engines_waited",
    ),
    (
        "tenants/flow_minutes/store.py",
        "each gateway's account of an engine counts",
        "query = select(*keys, *sums).where(ranked.c.place == 1)",
        "query = select(*keys, *sums)",
        "tests/integration/test_engine_time.py::"
        "test_of_several_gateways_the_one_that_saw_a_replica_longest_counts_minute_by_minute",
    ),
    (
        "gateway/console/formats.py",
        "pages round the digits that they show on hover",
        "return element.format(nanousd, ",
        "return element.format(nanousd // 1_000 * 1_000, ",
        "tests/unit/gateway/console/test_formats.py",
    ),
    (
        "gateway/console/csv_file.py",
        "a file that is cut does not say so",
        'more = [(f"more rows: {next_part}",)] if next_part else []',
        "more: list[tuple[str]] = []",
        "tests/integration/test_console_lists.py",
    ),
    (
        "ops/settings/shown.py",
        "the page of settings shows secrets",
        "    if row.secret:\n",
        "    if False:\n",
        "tests/unit/ops/settings/test_shown.py::"
        "test_each_setting_says_what_set_it_and_secrets_only_that_they_are_set",
    ),
]
MONEY_MUTATIONS = mutations_of("money", _BROKEN)
