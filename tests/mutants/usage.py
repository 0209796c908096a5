"""Mutants of the sums of usage, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

FOLD = "tests/integration/test_usage_fold.py"
IDS = "tests/property/test_usage_final_ids.py"
SUMS = "tests/unit/tenants/usage/test_sums.py"

_BROKEN: list[Broken] = [
    (
        "tenants/usage/final_ids.py",
        "the newest id that is seen is final",
        "    if not running:\n        return newest_id, WaitingIds()\n",
        "    if True:\n        return newest_id, WaitingIds()\n",
        f"{FOLD}::test_ids_that_become_visible_out_of_order_are_not_lost",
    ),
    (
        "tenants/usage/final_ids.py",
        "a transaction that goes on is not waited for",
        "    if waiting.transactions & running:\n",
        "    if waiting.transactions == running:\n",
        IDS,
    ),
    (
        "tenants/usage/final_ids.py",
        "what comes while others are waited for is final with it",
        "    return max(final_id, waiting.newest_id), ",
        "    return max(final_id, newest_id), ",
        "tests/unit/tenants/usage/test_final_ids.py::test_what_came_while_others_were_waited_for_waits_for_those_that_run_now",
    ),
    (
        "tenants/usage/fold.py",
        "two fold from one position",
        "        query = query.with_for_update(skip_locked=not waits)\n",
        "        pass\n",
        f"{FOLD}::test_two_that_fold_at_once_count_nothing_twice",
    ),
    (
        "tenants/usage/fold.py",
        "a full round goes on behind what it read",
        "            folded_id=charges[-1].ledger_id if has_more else ",
        "            folded_id=final_id if has_more else ",
        f"{FOLD}::test_sums_are_the_ledger_by_every_group_and_window",
    ),
    (
        "tenants/usage/read.py",
        "what is not folded is left out",
        "grouped(charges if is_whole else (), query, at)",
        "grouped((), query, at)",
        f"{FOLD}::test_what_is_not_folded_yet_is_added",
    ),
    (
        "tenants/usage/read.py",
        "a page begins again with what is not folded",
        "        if after is None or key > after:\n",
        "        if True:\n",
        f"{FOLD}::test_pages_hold_every_group_once_while_rows_arrive",
    ),
    (
        "tenants/usage/verify.py",
        "a correction counts what is not folded yet",
        ", ledger.c.id <= at.folded_id)",
        ")",
        f"{FOLD}::test_wrong_sums_are_found_and_a_rebuild_gives_identical_tables",
    ),
    (
        "tenants/usage/sums.py",
        "labels in another order are another set",
        'msgspec.json.encode(found, order="sorted")',
        "msgspec.json.encode(found)",
        SUMS,
    ),
]

USAGE_MUTATIONS = mutations_of("usage", _BROKEN)
