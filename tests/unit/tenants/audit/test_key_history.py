"""A change of the log's key: known from one trusted key on, and only as far as both keys have signed it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tenants.audit import key_history
from tenants.audit.entry import encode
from tenants.audit.key_history import KeyHistory, SignerChange, change_from
from tenants.audit.note import Checkpoint, PublicKey, SigningKey
from tenants.audit.tree import frontier_of, leaf_hash
from tenants.audit.verify import Damage, LogRow, LogVerifier, Verdict
from tenants.errors import Invalid
from tests.support.audit_logs import LogCopy, row

NAME = "test.example/log"
KEYS = [SigningKey(NAME, bytes(31) + bytes([number])) for number in range(4)]
ENDS = (10, 20, 30)
"""Sizes at which the key changes."""


def change_row(seq: int, old: PublicKey, new: PublicKey) -> LogRow:
    fields: dict[str, Any] = dict(row(seq).fields) | {
        "action": key_history.ACTION,
        "target": key_history.TARGET,
        "tenant_id": None,
        "before": {"public_key": str(old)},
        "after": {"public_key": str(new)},
    }
    return LogRow(seq, encode(seq, fields), fields)


def changes_of(rows: list[LogRow]) -> list[SignerChange]:
    return [each for row in rows if (each := change_from(row.entry)) is not None]


def note_of(rows: list[LogRow], size: int, *keys: SigningKey) -> str:
    edge = frontier_of(leaf_hash(each.entry) for each in rows[:size])
    text = Checkpoint(NAME, size, edge.root).text
    return keys[0].signed(text) + "".join(key.signature(text) for key in keys[1:])


def log() -> LogCopy:
    """A log of 40 rows that four keys have signed, each for a quarter of it."""
    made = LogCopy([row(seq) for seq in range(40)])
    for end, old, new in zip(ENDS, KEYS, KEYS[1:], strict=False):
        made.rows[end - 1] = change_row(end - 1, old.public, new.public)
    made.recompute()
    made.checkpoints = [
        (size, note_of(made.rows, size, KEYS[(size - 1) // 10])) for size in (5, 15, 25, 35, 40)
    ]
    for number, end in enumerate(ENDS):
        made.checkpoints.append((end, note_of(made.rows, end, *KEYS[number : number + 2])))
    return made


def verdict(log: LogCopy, *keys: PublicKey, kept: tuple[str, ...] = ()) -> Verdict:
    changes = changes_of(log.rows)
    verifier = LogVerifier(keys, log.checkpoints, kept=kept, tiles=log.tiles, changes=changes)
    for each in log.rows:
        verifier.add(each)
    return verifier.verdict(log.head)


@pytest.mark.parametrize("number", range(4))
def test_one_key_of_the_chain_is_enough_in_both_directions(number: int) -> None:
    whole = log()
    found = verdict(whole, KEYS[number].public)
    assert (found.finding, found.signed, found.checkpoints) == (None, 40, 8)
    for _, note in whole.checkpoints:
        assert verdict(whole, KEYS[number].public, kept=(note,)).finding is None


def test_no_key_of_the_chain_is_none() -> None:
    finding = verdict(log(), SigningKey(NAME, bytes(31) + b"9").public).finding
    assert finding is not None
    assert finding.damage is Damage.CHECKPOINT


def test_each_key_signs_for_its_time_only() -> None:
    history = KeyHistory([KEYS[1].public], changes_of(log().rows), dict(log().checkpoints))
    names = {key.public: number for number, key in enumerate(KEYS)}
    assert [[names[key] for key in history.at(size)] for size in (1, 9, 10, 11, 20, 21, 30, 31, 99)] == [
        *([0], [0], [0, 1], [1], [1, 2], [2], [2, 3], [3], [3])
    ]
    assert [each.size for each in history.changes] == list(ENDS)


@pytest.mark.parametrize("number", range(4))
def test_the_old_key_in_the_wrong_hands_goes_on_with_nothing(number: int) -> None:
    """An old key signs a checkpoint after its end, of rows that are there, or of a history of its own."""
    stolen = log()
    stolen.checkpoints = [
        (size, note_of(stolen.rows, size, KEYS[0]) if size == 35 else note)
        for size, note in stolen.checkpoints
    ]
    finding = verdict(stolen, KEYS[number].public).finding
    assert finding is not None
    assert (finding.damage, finding.first) == (Damage.CHECKPOINT, 34)
    with pytest.raises(Invalid, match="no known key"):
        verdict(log(), KEYS[number].public, kept=(note_of(log().rows, 35, KEYS[0]),))


@pytest.mark.parametrize("signers", [(KEYS[0],), (KEYS[1],), (KEYS[0], KEYS[2]), ()])
def test_a_change_that_not_both_keys_have_signed_is_none(signers: tuple[SigningKey, ...]) -> None:
    forged = log()
    forged.checkpoints = [each for each in forged.checkpoints if each[0] != 10]
    if signers:
        forged.checkpoints.append((10, note_of(forged.rows, 10, *signers)))
    first = verdict(forged, KEYS[0].public).finding
    assert first is not None
    assert first.damage is Damage.CHECKPOINT
    assert first.first >= 9  # what the first key signed itself is right
    last = verdict(forged, KEYS[3].public).finding
    assert last is not None
    assert (last.damage, last.first) == (Damage.CHECKPOINT, 4)


def test_a_row_that_names_a_key_of_an_attacker_changes_nothing() -> None:
    """Who can write the database, and has no key, can add the row, and sign with his own."""
    forged, mallory = log(), SigningKey(NAME, bytes(31) + b"m")
    forged.rows.append(change_row(40, KEYS[3].public, mallory.public))
    forged.recompute()
    assert verdict(forged, KEYS[0].public).finding is None  # one more row, which is not signed
    forged.checkpoints.append((41, note_of(forged.rows, 41, mallory)))
    finding = verdict(forged, KEYS[0].public).finding
    assert finding is not None
    assert (finding.damage, finding.first) == (Damage.CHECKPOINT, 40)


def test_a_row_that_cannot_be_read_is_no_change() -> None:
    whole: Any = change_row(3, KEYS[0].public, KEYS[1].public)
    assert change_from(whole.entry) == SignerChange(3, KEYS[0].public, KEYS[1].public)
    wrong: tuple[dict[str, Any], ...] = (
        {"before": None},
        {"after": {"public_key": "x"}},
        {"after": {}},
        {"action": "tenant.set"},
    )
    for fields in wrong:
        assert change_from(encode(3, {**whole.fields, **fields})) is None
    assert change_from(b"{") is None
    other_name = replace(KEYS[1].public, name="other.example/log")
    history = KeyHistory(
        [KEYS[0].public],
        [SignerChange(9, KEYS[0].public, other_name)],
        {10: note_of(log().rows, 10, KEYS[0], SigningKey("other.example/log", KEYS[1].seed))},
    )
    assert history.changes == []


def test_a_restore_gives_the_log_another_name_and_nothing_else_does() -> None:
    renamed = SigningKey("other.example/log", bytes(32))
    for new, is_restore, counts in ((renamed, True, 1), (renamed, False, 0), (KEYS[1], True, 0)):
        text = Checkpoint(new.name, 10, bytes(32)).text
        change = SignerChange(9, KEYS[0].public, new.public, is_restore)
        for known in (KEYS[0], new):
            note = KEYS[0].signed(text) + new.signature(text)
            assert len(KeyHistory([known.public], [change], {10: note}).changes) == counts
        assert KeyHistory([new.public], [change], {10: new.signed(text)}).changes == []


def test_without_the_old_key_only_who_trusts_the_new_one_goes_over_the_change() -> None:
    old, new, newer = (
        KEYS[0],
        SigningKey("other.example/log", bytes(32)),
        SigningKey("other.example/log", b"1" * 32),
    )
    lost = SignerChange(9, old.public, new.public, is_restore=True, is_by_both=False)
    later = SignerChange(19, new.public, newer.public)
    texts = {size: Checkpoint(new.name, size, bytes(32)).text for size in (10, 20)}
    notes = {10: new.signed(texts[10]), 20: new.signed(texts[20]) + newer.signature(texts[20])}
    trusted = {old: [], new: [lost, later], newer: [lost, later]}
    for key, changes in trusted.items():
        assert KeyHistory([key.public], [lost, later], notes).changes == changes
    assert KeyHistory([new.public], [lost], {10: old.signed(texts[10])}).changes == []
    rotated = SignerChange(4, KEYS[1].public, old.public)
    signed = Checkpoint(old.name, 5, bytes(32)).text
    notes[5] = KEYS[1].signed(signed) + old.signature(signed)
    assert KeyHistory([KEYS[1].public], [rotated, lost], notes).changes == [rotated]
    assert KeyHistory([KEYS[1].public, new.public], [rotated, lost], notes).changes == [rotated, lost]
