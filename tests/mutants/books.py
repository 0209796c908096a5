"""Mutants of what is counted and kept: quota slices, audit, usage, records, webhooks, configuration."""

from __future__ import annotations

from tests.mutants.mutations import mutations_of

VERIFY = "tenants/audit/verify.py"
FOUND = "tests/property/test_audit_verify.py::test_what_was_done_to_a_log_is_found_and_its_row_named"
STORED = (
    "tests/property/test_audit_verify.py::test_a_stored_subtree_and_a_head_that_are_not_the_rows_are_found"
)
HISTORY = "tests/unit/tenants/audit/test_key_history.py"
DIGESTS = "tests/integration/test_ledger_digests.py"
PERSONS = "tenants/audit/persons.py"
RELOCATION = "gateway/requests/relocation.py"
MOVES = "tests/integration/test_relocation.py"
CHECKPOINTS = "tests/integration/test_audit_checkpoints.py"
OUTBOX = "tests/integration/test_outbox.py"
APPLIED = "tests/integration/test_config_file.py"
CHARGE = "tests/unit/gateway/cluster/test_crash_charge.py"
GIVEN_BACK = (
    "tests/contract/test_quota_store.py::test_what_is_given_back_is_free_again_in_its_own_window_and_epoch"
)
FALLBACK = "tests/property/test_quota_fallback.py"
REFUSALS = "tests/integration/test_refusals.py"
MERGED = "tests/unit/tenants/counts/test_refusal.py"
SPARE = "tenants/quota/spare.py"
RULES = "tenants/quota/rules.py"
LUA = "tenants/quota/lua/common.lua"
STORES = "tests/property/test_quota_spare.py::test_both_stores_refill_by_exactly_what_was_in_force"
SPARE_TEST = "tests/unit/tenants/quota/test_spare.py"
EFFECTIVE = "rate + max(0, ceiling - rate) * min(WHOLE, max(0, share)) // WHOLE"
IN_LUA = "limit.rate + quotient((limit.ceiling - limit.rate) * change[2], 1000)"
FOLD = "tests/integration/test_usage_fold.py"

BOOKS_MUTATIONS = mutations_of(
    [
        (
            RELOCATION,
            "moves: a request takes down as many engines as there are",
            "and losses < self._most_losses",
            "",
            MOVES,
        ),
        (
            RELOCATION,
            "moves: what came before is computed as new",
            "kv_tokens=computed_tokens(use),",
            "",
            MOVES,
        ),
        (
            RELOCATION,
            "moves: a request forgets where it was",
            "run.left_at.append(before.upstream)",
            "pass",
            MOVES,
        ),
        (
            RELOCATION,
            "moves: a wait for a place never ends",
            "until_s = math.inf if cause == DRAINED else now_s + self._wait_s[call.tier]",
            "until_s = math.inf",
            MOVES,
        ),
        (
            "gateway/flow/controller.py",
            "moves: a server that cannot resume begins anew",
            "needs=ticket.needs | {RESUMES} if output_tokens else ticket.needs,",
            "",
            MOVES,
        ),
        (
            "gateway/flow/controller.py",
            "moves: what ends before its turn elsewhere is free",
            "self.counters.charge(entry.tenant_id, entry.weight, cost)",
            "pass",
            MOVES,
        ),
        (
            VERIFY,
            "audit: columns are not compared with the bytes",
            "            if name is not None:",
            "            if False:",
            FOUND,
        ),
        (
            VERIFY,
            "audit: signed roots are not compared",
            "if stored.root != root:",
            "if False:",
            FOUND,
        ),
        (
            VERIFY,
            "audit: a checkpoint stands for any size",
            "        if opened.size != size:",
            "        if False:",
            FOUND,
        ),
        (
            VERIFY,
            "audit: rows that are cut off are not missed",
            "        if told > size:",
            "        if False:",
            FOUND,
        ),
        (
            VERIFY,
            "audit: the head's root is not compared",
            "head.root == self._edge.root and head",
            "head",
            STORED,
        ),
        (
            "tenants/audit/note.py",
            "audit: any known key signs for any log",
            "own = [key for key in keys if key.name == claimed.origin]",
            "own = list(keys)",
            "tests/unit/tenants/audit/test_note.py",
        ),
        (
            "tenants/audit/checkpoints.py",
            "audit: two histories are signed",
            "        require_extension(connection, open_checkpoint(last.note, [own]), edge)\n",
            "",
            f"{CHECKPOINTS}::test_a_changed_log_is_not_signed",
        ),
        (
            "migrations/stages.py",
            "upgrade: the contract step runs while an older gateway serves",
            "    if older:\n",
            "    if False:\n",
            "tests/integration/test_contract.py::test_it_waits_for_older_gateways_and_none_serves_after_it",
        ),
        (
            "ops/recovery/restore.py",
            "restore: gateways of the backup count as alive",
            "    end_all(connection)\n",
            "",
            "tests/e2e/test_restore.py::test_a_restored_server_settles_what_was_open_and_a_witness_goes_on",
        ),
        (
            "tenants/audit/key_history.py",
            "audit: the new key alone signs a change",
            "[change.old, change.new] if change.is_by_both else [change.new]",
            "[change.new]",
            f"{HISTORY}::test_a_change_that_not_both_keys_have_signed_is_none",
        ),
        (
            "tenants/ledger/digests.py",
            "audit: rows that no span has are passed over",
            "    if span.first_id != next_id or",
            "    if",
            f"{DIGESTS}::test_digests_that_do_not_follow_each_other_are_named",
        ),
        (
            "tenants/ledger/price_check.py",
            "audit: charges are not computed again",
            "    if least <= row.cost_nanousd <= most:",
            "    if True:",
            f"{DIGESTS}::test_each_charge_is_computed_again_by_the_prices_of_its_version",
        ),
        (
            "tenants/storage/server_role.py",
            "audit: the server's role may change rows of the audit",
            'f"GRANT SELECT, INSERT ON {tables(list(APPEND_ONLY))} TO {name}"',
            'f"GRANT SELECT, INSERT, UPDATE ON {tables(list(APPEND_ONLY))} TO {name}"',
            "tests/integration/test_server_role.py::test_a_server_runs_as_the_role",
        ),
        (
            "gateway/http/accesses.py",
            "audit: a refused attempt leaves no row",
            "    if status in REFUSED and",
            "    if status in () and",
            (
                "tests/integration/test_audit_accesses.py"
                "::test_calls_of_the_admin_api_that_are_refused_or_read_are_rows"
            ),
        ),
        (
            "tenants/admin/people.py",
            "audit: an erased person's name stays",
            "            persons.erase(connection, before.person_id)\n",
            "",
            "tests/integration/test_audit_persons.py::test_an_erased_person_is_in_no_table_and_every_proof_holds",
        ),
        (
            PERSONS,
            "audit: a record that was altered is shown",
            "text if hash_of(salt, text) == digest else ALTERED",
            "text",
            "tests/integration/test_audit_persons.py::test_a_record_that_was_altered_is_not_shown_as_the_name",
        ),
        (
            "tenants/outbox/address.py",
            "alerts: a private address is taken",
            "    if not allows_private and not all(map(is_public, addresses)):\n",
            "    if False:\n",
            "tests/unit/tenants/outbox/test_address.py",
        ),
        (
            "gateway/alerts/sender.py",
            "alerts: the address is looked up when the webhook is added, and never again",
            "            address = await address_of(target, allows_private=self._allows_private)\n",
            "            address = await address_of(target, allows_private=True)\n",
            f"{OUTBOX}::test_a_private_address_is_refused_when_it_is_added_and_when_it_is_sent_to",
        ),
        (
            "tenants/admin/transaction.py",
            "config: a plan is applied at any state",
            "if at_revision not in (None, revision - 1):",
            "if False:",
            f"{APPLIED}::test_of_two_applies_at_once_one_wins",
        ),
        (
            "tenants/config_file/plan_keys.py",
            "config: any key of a name is the one that is meant",
            "if len(same_name) > 1:",
            "if False:",
            f"{APPLIED}::test_keys_that_a_file_cannot_name_are_left_out_and_said",
        ),
        (
            "tenants/nouns/key.py",
            "config: a key is changed to models beyond its tenant's",
            'check_models(owner, new.get("models"))',
            "check_models(owner, None)",
            "tests/integration/test_admin.py::test_what_a_key_may_do_is_changed_within_its_tenants",
        ),
        (
            "gateway/cluster/crash_charge.py",
            "crash: limits count only what was reported",
            "return CrashCharge(RequestOutcome.LOST, charged, whole, detail)",
            "return CrashCharge(RequestOutcome.LOST, charged, counted_use, detail)",
            CHARGE,
        ),
        (
            "gateway/cluster/crash_charge.py",
            "crash: the progress record is not billed",
            "if sent is None or sent.output_tokens <= charged.output_tokens:",
            "if sent is None or sent.output_tokens:",
            CHARGE,
        ),
        (
            "tenants/quota/lua/give_back.lua",
            "crash: what a rebuild has filled in is given back again",
            "if is_lost() then\n  return {'lost'}\nend\n",
            "",
            GIVEN_BACK,
        ),
        (
            "tenants/quota/fallback.py",
            "fallback.py: the whole limit is one gateway's slice",
            "    amount = limit.amount * slice_percent // 100\n",
            "    amount = limit.amount\n",
            f"{FALLBACK}::test_what_is_given_out_without_redis_stays_within_a_slice_each_and_is_counted_once",
        ),
        (
            "tenants/quota/fallback.py",
            "fallback.py: a slice is larger than what was left",
            "replace(limit, amount=min(amount, available))",
            "replace(limit, amount=amount)",
            f"{FALLBACK}::test_nothing_is_given_out_of_what_was_never_seen_or_was_full_when_last_seen",
        ),
        (
            "tenants/quota/fallback.py",
            "fallback.py: the next outage gives the same room out again",
            "        self._seen.clear()\n",
            "",
            f"{FALLBACK}::test_what_was_seen_before_an_outage_is_not_given_out_again_in_the_next",
        ),
        (
            "tenants/quota/fallback.py",
            "fallback.py: what ended after the ledger was read stays held",
            "            await self._shared.settle(request_id, actual)\n            outage.ended",
            "            outage.ended",
            f"{FALLBACK}::test_what_is_given_out_after_the_ledger_was_read_again_is_refused",
        ),
        (
            "tenants/quota/fallback.py",
            "fallback.py: a hold that was filled in again is relied on",
            "            if running.epoch != outage.epoch:\n",
            "            if False:\n",
            f"{FALLBACK}::test_a_hold_that_was_filled_in_again_is_not_relied_on_before_the_store_has_named_it",
        ),
        (
            "tenants/storage/flushes.py",
            "records: a repeated flush counts again",
            "where=flushes.c.number < new.excluded.number,",
            "where=flushes.c.number <= new.excluded.number,",
            REFUSALS,
        ),
        (
            "gateway/records/exact_writer.py",
            "records: an unanswered flush gets a new number",
            "            if self._unanswered is None:\n                self._unanswered = self.take()\n",
            (
                "            self._number += self._unanswered is not None\n"
                "            if self._unanswered is None:\n                self._unanswered = self.take()\n"
            ),
            REFUSALS,
        ),
        (
            "tenants/counts/refusal_store.py",
            "records: a tenant reads the platform's numbers",
            "        if not self.of_platform:\n",
            "        if self.of_platform:\n",
            MERGED,
        ),
        (
            "tenants/resources/reading.py",
            "records: a tenant's list has every tenant's",
            "        if one.filter.kind is Kind.TENANT:\n",
            "        if one.filter.kind is Kind.TENANT and request.of_tenant is None:\n",
            REFUSALS,
        ),
        (
            "tenants/resources/records/refusals.py",
            "records: a tenant's cursor names requests of others",
            '        indexes = ("request_id", "key", "project", "tenant")\n',
            "        pass\n",
            f"{REFUSALS}::test_a_tenants_cursor_names_no_request_of_another",
        ),
        (
            "gateway/records/key_use_recorder.py",
            "records: a use while the one before is written is lost",
            "                if self._last_us[key_id] == last_us:  # not used again meanwhile\n",
            "                if key_id in self._last_us:\n",
            f"{REFUSALS}::test_uses_of_keys_that_are_being_written_survive_the_end_of_a_gateway",
        ),
        (
            SPARE,
            "spare: a bucket refills beyond its ceiling",
            EFFECTIVE,
            "rate + ceiling * share // WHOLE",
            SPARE_TEST,
        ),
        (
            LUA,
            "spare: in Redis a bucket refills beyond its ceiling",
            IN_LUA,
            "limit.rate + quotient(limit.ceiling * change[2], 1000)",
            STORES,
        ),
        (
            RULES,
            "spare: what is in force now counts for the time before",
            "    for since_ms, share in history:\n",
            "    for since_ms, share in [(0, share) for _, share in history[-1:]]:\n",
            SPARE_TEST,
        ),
        (
            RULES,
            "spare: a window follows spare capacity",
            "        limit.is_bucket\n        and limit.mode is LimitMode.HARD\n",
            "        limit.mode is LimitMode.HARD\n",
            SPARE_TEST,
        ),
        (
            "tenants/usage/fold.py",
            "usage: the newest id that is seen is final",
            "    if not running:\n        return newest_id, WaitingIds()\n",
            "    if True:\n        return newest_id, WaitingIds()\n",
            f"{FOLD}::test_ids_that_become_visible_out_of_order_are_not_lost",
        ),
        (
            "tenants/usage/fold.py",
            "usage: two fold from one position",
            "        query = query.with_for_update(skip_locked=not waits)\n",
            "        pass\n",
            f"{FOLD}::test_two_that_fold_at_once_count_nothing_twice",
        ),
        (
            "tenants/usage/fold.py",
            "usage: a full round goes on behind what it read",
            "            folded_id=charges[-1].ledger_id if has_more else ",
            "            folded_id=final_id if has_more else ",
            f"{FOLD}::test_sums_are_the_ledger_by_every_group_and_window",
        ),
        (
            "tenants/usage/read.py",
            "usage: what is not folded is left out",
            "grouped(charges if is_whole else (), query, at)",
            "grouped((), query, at)",
            f"{FOLD}::test_what_is_not_folded_yet_is_added",
        ),
        (
            "tenants/usage/verify.py",
            "usage: a correction counts what is not folded yet",
            ", ledger.c.id <= at.folded_id)",
            ")",
            f"{FOLD}::test_wrong_sums_are_found_and_a_rebuild_gives_identical_tables",
        ),
    ]
)
