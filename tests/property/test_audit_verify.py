"""Property: what is done to a signed log is found and its row named, in the database and in the file.

The attacker has the database and recomputes every hash that needs no key. With the key in his hands, a
checkpoint that was kept elsewhere finds it.
"""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenants.audit.tree import TILE
from tenants.audit.verify import AuditFinding, Damage
from tests.support.audit_logs import ATTACKS, Attack, LogCopy, log_of

SIZES = (1, 2, 3, 9, 64, 257, 300)
LONG_SIZES = (256, 512, 700, 1_999, 2_000)
EVERY = 40
"""Rows between two checkpoints, of most."""


def signed_sizes(size: int) -> list[int]:
    """Sizes of its checkpoints: every so many rows, some close together, and all rows."""
    return sorted(
        {size, size - 1, *range(EVERY, size + 1, EVERY), *range(EVERY + 1, size + 1, 3 * EVERY)} - {0}
    )


@cache
def _log(size: int) -> LogCopy:
    return log_of(size, signed_sizes(size))


def assert_found(finding: AuditFinding | None, attack: Attack, size: int, at: int, other: int) -> None:
    assert finding is not None, attack.name
    assert finding.damage in attack.damages, (attack.name, str(finding))
    row = attack.shows_at(at, other)
    if finding.damage is Damage.CHECKPOINT:
        row = min(each for each in signed_sizes(size) if each > at) - 1
    assert finding.first <= row <= finding.last, (attack.name, str(finding))
    if attack.is_exact:
        assert finding.first == row, (attack.name, str(finding))
    elif finding.damage is not Damage.TRUNCATED:
        assert finding.last - finding.first <= EVERY, (attack.name, str(finding))
    assert str(finding)


def examine(attack: Attack, data: st.DataObject, sizes: tuple[int, ...]) -> None:
    size = data.draw(st.sampled_from(sizes))
    log = _log(size).copy()
    assert log.verdict().finding is None
    most = size - 2 if attack.spares_last else size - 1
    if most < 0:
        return
    at = data.draw(st.integers(0, most))
    other = data.draw(st.integers(0, size - 1).filter(lambda row: row != at)) if size > 1 else 0
    attack.act(log, at, other)
    assert_found(log.verdict().finding, attack, size, at, other)
    assert_found(log.verdict_of_export().finding, attack, size, at, other)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_what_was_done_to_a_log_is_found_and_its_row_named(attack: Attack, data: st.DataObject) -> None:
    examine(attack, data, SIZES)


@pytest.mark.long
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_the_same_of_longer_logs(attack: Attack, data: st.DataObject) -> None:
    examine(attack, data, LONG_SIZES)


BY_KEY = [each for each in ATTACKS if each.name.endswith(("anew", "no key", "truncated"))]


@pytest.mark.parametrize("attack", BY_KEY, ids=lambda attack: attack.name)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_with_the_key_it_is_found_against_a_kept_checkpoint(attack: Attack, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(SIZES[2:]))
    log = _log(size).copy()
    sizes = signed_sizes(size)
    kept = [note for _, note in log.checkpoints if data.draw(st.booleans())] or [log.checkpoints[-1][1]]
    most = max(number for number, note in log.checkpoints if note in kept)
    at = data.draw(st.integers(0, most - 1))
    other = data.draw(st.integers(0, most - 1).filter(lambda row: row != at)) if most > 1 else 0
    if attack.spares_last and other == at:
        return
    attack.act(log, at, other)
    log.recompute()
    log.sign([each for each in sizes if each <= len(log.rows)] or [len(log.rows)])
    assert log.verdict().finding is None  # nothing in the database says it
    for finding in (log.verdict(kept).finding, log.verdict_of_export(kept).finding):
        assert finding is not None
        assert finding.damage in {Damage.REWRITTEN, Damage.TRUNCATED}
        row = attack.shows_at(at, other)
        assert finding.first <= max(row, len(log.rows) if finding.damage is Damage.TRUNCATED else row)
        assert row <= finding.last


def test_rows_and_checkpoints_that_are_cut_off_together_are_found_only_by_a_kept_one() -> None:
    log = _log(300).copy()
    newest = log.checkpoints[-1][1]
    del log.rows[100:]
    log.recompute()
    log.checkpoints = [(size, note) for size, note in log.checkpoints if size <= 100]
    assert log.verdict().finding is None
    finding = log.verdict([newest]).finding
    assert finding is not None
    assert (finding.damage, finding.first, finding.last) == (Damage.TRUNCATED, 100, 299)


def test_a_stored_subtree_and_a_head_that_are_not_the_rows_are_found() -> None:
    for number in range(300 // TILE):
        log = _log(300).copy()
        log.tiles[number] = (number, bytes(32))
        finding = log.verdict().finding
        assert finding is not None
        assert (finding.damage, finding.first) == (Damage.SUBTREE, number * TILE)
    for tiles in ([], [(0, _log(300).tiles[0][1]), (1, bytes(32))], [(1, _log(300).tiles[0][1])]):
        log = _log(300).copy()
        log.tiles = tiles
        finding = log.verdict().finding
        assert finding is not None
        assert finding.damage is Damage.SUBTREE
    whole = _log(300).head
    heads = {
        "size": (_log(64).head, 64),
        "root": (type(whole)(300, bytes(32), whole.peaks), 299),
        "frontier": (type(whole)(300, whole.root, _log(64).head.peaks), 299),
    }
    for name, (head, first) in heads.items():
        log = _log(300).copy()
        log.head = head
        finding = log.verdict().finding
        assert finding is not None, name
        assert (finding.damage, finding.first) == (Damage.HEAD, first), name


def test_rows_after_the_last_checkpoint_are_checked_by_the_head_and_said_to_be_unsigned() -> None:
    log = log_of(100, [40, 90])
    verdict = log.verdict()
    assert (verdict.rows, verdict.signed, verdict.checkpoints, verdict.finding) == (100, 90, 2, None)
    edit = next(each for each in ATTACKS if each.name == "bytes and columns")
    edit.act(log, 95, 0)
    finding = log.verdict().finding
    assert finding is not None
    assert (finding.damage, finding.first, finding.last) == (Damage.HEAD, 90, 99)
