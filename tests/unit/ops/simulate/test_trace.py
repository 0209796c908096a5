"""Trace files, and the errors of files that are none."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from ops.simulate.traffic import trace
from ops.simulate.traffic.generate import ARENA, AZURE
from ops.simulate.traffic.requests import BadTrace, SimulatedRequest, Sped
from ops.simulate.traffic.trace import EVERYBODY, TraceFile

HEADER = "arrival_s,tenant,input_tokens,output_tokens,prefix_blocks\n"


def written(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_trace_is_read_with_its_tenants_and_prefixes(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER + "0.5,acme,600,7,3 4\n0.5,,1,1,\n")
    source = TraceFile(path)
    assert source.has_prefixes
    assert list(source) == [
        SimulatedRequest(0.5, "acme", 600, 7, (3, 4)),
        SimulatedRequest(0.5, EVERYBODY, 1, 1),
    ]
    assert list(source) == list(source), "every policy must see the same requests"


def test_a_gzip_file_is_known_by_its_first_bytes_and_not_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(b"input_tokens,arrival_s,output_tokens,note\n5,1,2,x\n"))
    assert list(TraceFile(path)) == [SimulatedRequest(1.0, EVERYBODY, 5, 2)]


def test_azures_columns_and_dates_are_understood(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,374,44\n"
        "2023-11-16 18:17:04.0319600,396,109\n"
        "2023-11-16 18:18:03.9799600,879,55\n",
    )
    found = list(TraceFile(path))
    assert [each.arrival_s for each in found] == pytest.approx([0.0, 0.052, 60.0], abs=1e-6)
    assert [(each.input_tokens, each.output_tokens) for each in found] == [(374, 44), (396, 109), (879, 55)]


def test_dates_with_a_zone_are_understood(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,9,4\n"
    assert [each.input_tokens for each in TraceFile(written(tmp_path, text))] == [9]


@pytest.mark.parametrize(
    ("row", "column", "why"),
    [
        ("-0.5,a,5,5,", "arrival_s", "at least 0"),
        ("nan,a,5,5,", "arrival_s", "at least 0"),
        ("soon,a,5,5,", "arrival_s", "must be seconds, or a date"),
        (",a,5,5,", "arrival_s", "--rate"),
        ("1,a,0,5,", "input_tokens", "must be between 1 and"),
        ("1,a,5,-2,", "output_tokens", "must be between 1 and"),
        ("1,a,5,99999999,", "output_tokens", "must be between 1 and 4,194,304"),
        ("1,a,5.5,5,", "input_tokens", "must be a whole number"),
        ("1,a,5,many,", "output_tokens", "must be a whole number"),
        ("1,a,600,5,1 x", "prefix_blocks", "whole numbers separated by spaces"),
        ("1,a,600,5,1 -2", "prefix_blocks", "ids must lie between"),
        ("1,a,600,5,1 2 3", "prefix_blocks", "at most 2 blocks"),
        ("0.1,a,5,5,", "arrival_s", "in order of arrival"),
    ],
)
def test_a_bad_field_is_named_with_file_line_and_column(
    tmp_path: Path, row: str, column: str, why: str
) -> None:
    path = written(tmp_path, HEADER + "0.2,a,5,5,\n" + row + "\n")
    with pytest.raises(BadTrace) as raised:
        list(TraceFile(path))
    assert str(raised.value).startswith(f"{path}, line 3, column {column}: ")
    assert why in str(raised.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no column input_tokens"),
        ("arrival_s,tenant,input_tokens\n0,a,5\n", "no column output_tokens (or GeneratedTokens)"),
        ("tenant,input_tokens,output_tokens\na,5,5\n", "no column arrival_s"),
        ("arrival_s,input_tokens,input_tokens,output_tokens\n", "stands there twice"),
        (HEADER, "there are no rows"),
        (HEADER + "1,a,5\n", "line 2: 3 columns where the header has 5"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(tmp_path: Path, text: str, why: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(BadTrace) as raised:
        list(TraceFile(path))
    assert str(path) in str(raised.value)
    assert why in str(raised.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="cannot be opened"):
        TraceFile(tmp_path / "none.csv")
    torn = tmp_path / "torn.csv.gz"
    torn.write_bytes(gzip.compress((HEADER + "1,a,5,5,\n" * 5000).encode())[:-30])
    with pytest.raises(BadTrace, match="line"):
        list(TraceFile(torn))
    latin = tmp_path / "latin.csv"
    latin.write_bytes(HEADER.encode() + b"1,\xe9,5,5,\n")
    with pytest.raises(BadTrace, match="UTF-8"):
        list(TraceFile(latin))


def test_everything_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, HEADER + "1,a,5,5,\n" * 10)
    monkeypatch.setattr(trace, "MOST_REQUESTS", 9)
    with pytest.raises(BadTrace, match="line 11: more than 9 rows"):
        list(TraceFile(path))
    monkeypatch.setattr(trace, "MOST_BYTES", 90)
    with pytest.raises(BadTrace, match="more than 90 characters"):
        list(TraceFile(path))
    monkeypatch.setattr(trace, "MOST_LINE", 20)
    with pytest.raises(BadTrace, match="line 1: longer than 20"):
        TraceFile(path)


def test_lengths_alone_get_arrivals_at_the_rate_that_is_asked(tmp_path: Path) -> None:
    path = written(tmp_path, "arrival_s,tenant,input_tokens,output_tokens\n" + ",,74,918\n" * 2000)
    source = TraceFile(path, rate=4.0, seed=3)
    found = list(source)
    assert source.name == "trace.csv at 4/s"
    assert found == list(source)
    assert found != list(TraceFile(path, 4.0, seed=4))
    assert found[-1].arrival_s == pytest.approx(500, rel=0.1)
    with pytest.raises(ValueError, match="rate must be above 0"):
        TraceFile(path, rate=0.0)


def test_a_source_can_be_made_faster_and_shorter(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER + "1,a,5,5,\n2,a,5,5,\n3,a,5,5,\n")
    assert [each.arrival_s for each in Sped(TraceFile(path), 2.0, 2)] == [0.5, 1.0]
    assert Sped(TraceFile(path), 2.0, 2).name == "trace.csv (x2, first 2)"
    with pytest.raises(ValueError, match="speed"):
        Sped(TraceFile(path), 0.0)
    with pytest.raises(ValueError, match="limit"):
        Sped(TraceFile(path), 1.0, 0)


@pytest.mark.parametrize(("path", "rows", "tenants"), [(AZURE, 19_366, 1), (ARENA, 1500, 27)])
def test_the_traces_that_ship_are_whole(path: Path, rows: int, tenants: int) -> None:
    found = list(TraceFile(path))
    assert len(found) == rows
    assert len({each.tenant for each in found}) == tenants
