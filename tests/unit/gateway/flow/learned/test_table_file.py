"""The file of a learned table: what it keeps, and what is no table, each with the way out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.flow.learned.actions import HYBRID
from gateway.flow.learned.table_file import BadLearnedTable, Judged, LearnedTable
from tests.support.learned_tables import STRICT_SLOTS, learned_table

GOOD = learned_table({0: HYBRID, 5: STRICT_SLOTS}, judged=Judged(1.0, 2.0, 0.5))


def test_what_is_written_is_read_again() -> None:
    read = LearnedTable.decode(GOOD.encode())
    assert read == GOOD
    assert [entry is not None for entry in read.indexed].count(True) == 2


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "it is no table of a learned policy"),
        (b"\x00\xff", "it is no table of a learned policy"),
        (b'{"format": "fairgate batch-or-wait table", "version": 1}', "it is no table of a learned policy"),
        (GOOD.encode().replace(b'"version": 1', b'"version": 2'), "of version 2, and this program reads"),
        (GOOD.encode().replace(b'"slots": 0.5', b'"slots": 0.1'), "Expected `float` >= 0.25"),
        (GOOD.encode().replace(b'"state": 5', b'"state": 0'), "a macro-state stands in it twice"),
        (GOOD.encode().replace(b'"state": 5', b'"state": 12'), "entries[1].state"),
        (GOOD.encode()[:-40], "it is no table of a learned policy"),
    ],
)
def test_what_is_no_table_of_this_version_is_refused(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(content)
    with pytest.raises(BadLearnedTable, match="make one with `fairgate policy learn`") as failed:
        LearnedTable.load(path)
    assert complaint in str(failed.value)
    assert str(path) in str(failed.value)


def test_a_file_that_is_missing_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(BadLearnedTable, match=r"no.json cannot be read: No such file.*fairgate policy learn"):
        LearnedTable.load(tmp_path / "no.json")


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(BadLearnedTable, match=f"{path}: it is no file; make one with"):
            LearnedTable.load(path)
