"""Mutants of the local slice that is given out without the shared store."""

from __future__ import annotations

from tests.mutants.mutations import Mutation

_TESTS = "tests/property/test_quota_fallback.py"

# (what goes wrong, what stands there, what stands there instead, the test)
_BROKEN: list[tuple[str, str, str, str]] = [
    (
        "the whole limit is one gateway's slice",
        "    amount = limit.amount * slice_percent // 100\n",
        "    amount = limit.amount\n",
        "test_what_is_given_out_without_redis_stays_within_a_slice_each_and_is_counted_once",
    ),
    (
        "a slice of what was never seen is given out",
        "outage.seen.get(name, 0)",
        "outage.seen.get(name, limit.amount)",
        "test_nothing_is_given_out_of_what_was_never_seen_or_was_full_when_last_seen",
    ),
    (
        "a slice is larger than what was left",
        "replace(limit, amount=min(amount, available))",
        "replace(limit, amount=amount)",
        "test_nothing_is_given_out_of_what_was_never_seen_or_was_full_when_last_seen",
    ),
    (
        "the next outage gives the same room out again",
        "        self._seen.clear()\n",
        "",
        "test_what_was_seen_before_an_outage_is_not_given_out_again_in_the_next",
    ),
    (
        "top-ups need no slice",
        "            and (self.may_be_cut or limit.window is None or ahead.of(limit.meter)",
        "            and (limit.window is None or ahead.of(limit.meter)",
        "test_promised_top_ups_need_no_slice_and_others_do",
    ),
    (
        "an outage ends although nobody counted it",
        "            if self._shared.epoch == self._outage.epoch:\n",
        "            if False:\n",
        "test_what_is_given_out_without_redis_stays_within_a_slice_each_and_is_counted_once",
    ),
    (
        "what is given out after the ledger was read is of the new epoch",
        "return self._shared.epoch if self._outage is None else self._outage.epoch",
        "return self._shared.epoch",
        "test_what_is_given_out_after_the_ledger_was_read_again_is_refused",
    ),
    (
        "what ended after the ledger was read stays held",
        "            await self._shared.settle(request_id, actual)\n            outage.ended",
        "            outage.ended",
        "test_what_is_given_out_after_the_ledger_was_read_again_is_refused",
    ),
    (
        "a store that lost its counters counts as away",
        "if isinstance(error, QuotaStoreRecovering) or not self._was_ready:",
        "if not self._was_ready:",
        "test_a_store_that_has_lost_its_counters_is_not_away",
    ),
    (
        "a slice is given out before the store was ready",
        "if isinstance(error, QuotaStoreRecovering) or not self._was_ready:",
        "if isinstance(error, QuotaStoreRecovering):",
        "test_before_the_store_was_ready_nothing_is_given_out",
    ),
    (
        "a hold that was filled in again is relied on",
        "            if running.epoch != outage.epoch:\n",
        "            if False:\n",
        "test_a_hold_that_was_filled_in_again_is_not_relied_on_before_the_store_has_named_it",
    ),
    (
        "a bucket's slice begins full",
        "[(part, max(0, part.amount - available))]",
        "[(part, 0)]",
        "test_a_bucket_begins_with_what_was_seen_and_flows_at_its_part_of_the_rate",
    ),
]

FALLBACK_MUTATIONS = [
    Mutation(f"fallback.py: {name}", "tenants/quota/fallback.py", before, after, f"{_TESTS}::{test}")
    for name, before, after, test in _BROKEN
]
