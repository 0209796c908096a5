"""Mutants of the audit's log, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

VERIFY = "tenants/audit/verify.py"
FOUND = "tests/property/test_audit_verify.py::test_what_was_done_to_a_log_is_found_and_its_row_named"
STORED = (
    "tests/property/test_audit_verify.py::test_a_stored_subtree_and_a_head_that_are_not_the_rows_are_found"
)
BY_KEY = "tests/property/test_audit_verify.py::test_with_the_key_it_is_found_against_a_kept_checkpoint"
CUT = (
    "tests/property/test_audit_verify.py"
    "::test_rows_and_checkpoints_that_are_cut_off_together_are_found_only_by_a_kept_one"
)
HISTORY = "tests/unit/tenants/audit/test_key_history.py"
DIGESTS = "tests/integration/test_ledger_digests.py"
CHANGED = f"{DIGESTS}::test_what_is_changed_in_a_closed_span_is_found_and_span_and_kind_named"
ACCESSES = "tenants/audit/accesses.py"
MERGED = "tests/unit/tenants/audit/test_accesses.py"
PERSONS = "tenants/audit/persons.py"
CHECKPOINTS = "tests/integration/test_audit_checkpoints.py"

_BROKEN: list[Broken] = [
    (
        "tenants/storage/tables/base.py",
        "text is read as the bytes of a row",
        'return value if value is None or isinstance(value, bytes) else b""',
        "return value",
        f"{CHECKPOINTS}::test_what_is_done_in_the_database_is_found",
    ),
    (
        VERIFY,
        "columns are not compared with the bytes",
        "            if name is not None:",
        "            if False:",
        FOUND,
    ),
    (
        VERIFY,
        "a row may lie anywhere",
        '        if said["seq"] != place:',
        "        if False:",
        FOUND,
    ),
    (
        VERIFY,
        "a row that lies further down is missing",
        "if self._found_later and number > place:",
        "if False:",
        FOUND,
    ),
    (
        VERIFY,
        "a copy of a row is any row of its number",
        "if leaf_hash(row.entry) == self._leaf(number):",
        "if False:",
        FOUND,
    ),
    (VERIFY, "signed roots are not compared", "if stored.root != root:", "if False:", FOUND),
    (
        VERIFY,
        "all rows are doubted, whatever was signed of them",
        "        first, last = self._good, size - 1\n        if self._tile_wrong",
        "        first, last = 0, size - 1\n        if self._tile_wrong",
        FOUND,
    ),
    (
        VERIFY,
        "a checkpoint that cannot be opened is left out",
        "        if self._unreadable is not None:",
        "        if False:",
        FOUND,
    ),
    (
        VERIFY,
        "a checkpoint stands for any size",
        "        if opened.size != size:",
        "        if False:",
        FOUND,
    ),
    (VERIFY, "rows that are cut off are not missed", "        if told > size:", "        if False:", FOUND),
    (
        VERIFY,
        "kept checkpoints say nothing of the size",
        "told = max([*self._stored, *self._kept, 0",
        "told = max([*self._stored, 0",
        CUT,
    ),
    (VERIFY, "kept roots are not compared", "if each.root != root), None)", "if False), None)", BY_KEY),
    (
        VERIFY,
        "stored subtrees are not compared",
        "        if stored != (number, root):",
        "        if False:",
        STORED,
    ),
    (
        VERIFY,
        "subtrees of no rows are accepted",
        "if number is None and len(self._tiles) > complete:",
        "if False:",
        STORED,
    ),
    (VERIFY, "a head of fewer rows is accepted", "        if head.size < size:", "        if False:", FOUND),
    (VERIFY, "the head's root is not compared", "head.root == self._edge.root and head", "head", STORED),
    (
        VERIFY,
        "the head's peaks are not compared",
        " and head.peaks in (None, self._edge.packed):",
        ":",
        STORED,
    ),
    (
        "tenants/audit/entry.py",
        "the number 1 is true",
        "        if _text(value) != _text(row.get(name)):",
        "        if value != row.get(name):",
        FOUND,
    ),
    (
        "tenants/audit/note.py",
        "a signature that is not right is passed over",
        "        except InvalidSignature:\n            raise Invalid(",
        "        except InvalidSignature:\n            continue\n            raise Invalid(",
        "tests/unit/tenants/audit/test_note.py",
    ),
    (
        "tenants/audit/note.py",
        "any known key signs for any log",
        "own = [key for key in keys if key.name == claimed.origin]",
        "own = list(keys)",
        "tests/unit/tenants/audit/test_note.py",
    ),
    (
        "tenants/audit/checkpoints.py",
        "two histories are signed",
        "        require_extension(connection, open_checkpoint(last.note, [own]), edge)\n",
        "",
        f"{CHECKPOINTS}::test_a_changed_log_is_not_signed",
    ),
    (
        "tenants/audit/store.py",
        "the head moves without its lock",
        "query.with_for_update() if is_locked else query",
        "query",
        "tests/integration/test_audit_log.py::test_a_writer_waits_for_one_that_has_not_ended",
    ),
    (
        "tenants/audit/key_history.py",
        "an old key signs for ever",
        "        return [self._changes[-1].new if later is None else later.old]",
        "        return [*(each.old for each in self._changes), self._changes[-1].new]",
        f"{HISTORY}::test_the_old_key_in_the_wrong_hands_goes_on_with_nothing",
    ),
    (
        "tenants/audit/key_history.py",
        "the new key alone signs a change",
        "text_signed_by_all(note, [change.old, change.new])",
        "text_signed_by_all(note, [change.new])",
        f"{HISTORY}::test_a_change_that_not_both_keys_have_signed_is_none",
    ),
    (
        "tenants/ledger/digests.py",
        "a span is closed while rows may still come",
        "first_id, final_id = _next_id(connection), fold.folded_id",
        "first_id, final_id = _next_id(connection),"
        " connection.execute(select(func.max(ledger.c.id))).scalar() or 0",
        f"{DIGESTS}::test_a_span_ends_before_a_row_that_an_open_transaction_may_still_add",
    ),
    (
        "tenants/ledger/digests.py",
        "two gateways close a span",
        "    if _next_id(connection) != span.first_id:",
        "    if False:",
        f"{DIGESTS}::test_gateways_that_close_at_once_close_each_span_once",
    ),
    (
        "tenants/ledger/digests.py",
        "rows that no span has are passed over",
        "    if span.first_id != next_id or",
        "    if",
        f"{DIGESTS}::test_digests_that_do_not_follow_each_other_are_named",
    ),
    (
        "tenants/ledger/spans.py",
        "a row's detail is left out",
        "leaf_hash(_encode(tuple(row)))",
        "leaf_hash(_encode(tuple(row[:21])))",
        CHANGED,
    ),
    (
        "tenants/ledger/price_check.py",
        "charges are not computed again",
        "    if least <= row.cost_nanousd <= most:",
        "    if True:",
        f"{DIGESTS}::test_each_charge_is_computed_again_by_the_prices_of_its_version",
    ),
    (
        "tenants/storage/server_role.py",
        "the server's role may change rows of the audit",
        'f"GRANT SELECT, INSERT ON {tables(list(APPEND_ONLY))} TO {name}"',
        'f"GRANT SELECT, INSERT, UPDATE ON {tables(list(APPEND_ONLY))} TO {name}"',
        "tests/integration/test_server_role.py::test_a_server_runs_as_the_role",
    ),
    (
        ACCESSES,
        "any number of names and addresses have rows",
        "if row is None and self._in_kind.get(kind, 0) >=",
        "if row is None and self._in_kind.get(kind, 0) < 0 * ",
        MERGED,
    ),
    (
        ACCESSES,
        "accesses wait without a bound",
        "            if len(self._rows) >= self._most_waiting:",
        "            if False:",
        MERGED,
    ),
    (
        "gateway/http/accesses.py",
        "a refused attempt leaves no row",
        "    if status in REFUSED and",
        "    if status in () and",
        "tests/integration/test_audit_accesses.py"
        "::test_calls_of_the_admin_api_that_are_refused_or_read_are_rows",
    ),
    (
        "tenants/people/way_in.py",
        "a refused password leaves no row",
        "            self.tell(LogIn(name[:MAX_TOLD_CHARS], address, why))\n",
        "",
        "tests/integration/test_audit_accesses.py"
        "::test_log_ins_good_and_bad_are_rows_with_their_count_and_address",
    ),
    (
        "tenants/admin/people.py",
        "an erased person's name stays",
        "            persons.erase(connection, before.person_id)\n",
        "",
        "tests/integration/test_audit_persons.py::test_an_erased_person_is_in_no_table_and_every_proof_holds",
    ),
    (
        PERSONS,
        "an erased person is recorded again",
        "    if is_there and _records(",
        "    if _records(",
        "tests/integration/test_audit_persons.py::test_an_erased_person_is_in_no_table_and_every_proof_holds",
    ),
    (
        PERSONS,
        "a record that was altered is shown",
        "text if hash_of(salt, text) == digest else ALTERED",
        "text",
        "tests/integration/test_audit_persons.py::test_a_record_that_was_altered_is_not_shown_as_the_name",
    ),
]

AUDIT_MUTATIONS = mutations_of("audit", _BROKEN)
