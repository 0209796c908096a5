"""Numbers, money and times as pages write them, and as files do."""

from __future__ import annotations

import csv
import io
import re

import pytest

from gateway.console import formats
from gateway.console.cards import cards, second_fact
from tenants.csv_table import csv_text


@pytest.mark.parametrize(
    ("nanousd", "shown", "exact"),
    [
        (0, "$0.00", "0.00"),
        (1, "<$0.0001", "0.000000001"),
        (12_345_678, "$0.0123", "0.012345678"),
        (1_500_000_000, "$1.50", "1.50"),
        (-2_000_000_000, "-$2.00", "-2.00"),
        (1_234_567_890_123_456_789, "$1,234,567,890.12", "1234567890.123456789"),
    ],
)
def test_money_is_rounded_for_eyes_and_exact_in_files(nanousd: int, shown: str, exact: str) -> None:
    assert (formats.money(nanousd), formats.exact_dollars(nanousd)) == (shown, exact)
    escaped = shown.replace("<", "&lt;")
    assert formats.exact_money(nanousd) == f'<data value="{nanousd}" title="${exact}">{escaped}</data>'
    assert formats.exact_money(None) == "–"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "–"), (0.0123, "12 ms"), (1.25, "1.2 s"), (600.0, "10 min"), (7_200.0, "2.0 h"),
        (864_000.0, "10.0 days"), (0, "0 ms"), (0.0001, "0.1 ms"), (0.0055, "5.5 ms"), (0.01, "10 ms"),
        (0.9, "900 ms"),
    ],
)  # fmt: skip
def test_lengths_of_time_and_of_short_ones_two_digits(value: float | None, words: str) -> None:
    assert formats.seconds(value) == words


def test_counts() -> None:
    assert [formats.number(each) for each in (None, 0, 1_234_567, 2.0, 0.123, 123.45)] == [
        "–", "0", "1,234,567", "2", "0.12", "123.5",
    ]  # fmt: skip
    assert [formats.short(each) for each in (None, 0, 999, 1_240_000, 5e9)] == [
        "–", "0", "999", "1.24 M", "5 G",
    ]  # fmt: skip
    assert [formats.fine_money(each) for each in (0, 41_237, 123, 1_500_000_000)] == [
        "$0.00", "$0.0000412", "$0.000000123", "$1.50",
    ]  # fmt: skip
    assert [formats.about(each) for each in (None, 0.5, 9.9, 44.4, 180)] == [
        "–", "0.5 s", "9.9 s", "44 s", "3 min",
    ]  # fmt: skip
    assert formats.percent(0.1234) == "12.3 %"
    assert (formats.percent(-0.0001), formats.number(-0.001)) == ("0.0 %", "0.00"), "no zero is below zero"


def test_a_time_has_utc_as_its_title() -> None:
    utc = "2026-01-05 00:00:00 UTC"
    assert formats.time(1_767_571_200_000_000) == (
        f'<time datetime="2026-01-05T00:00:00.000+00:00" title="{utc}">{utc}</time>'
    )
    assert formats.time(None) == "–"


def test_a_spreadsheet_runs_nothing_of_a_file() -> None:
    names = ["=1+1", "+1", "-1", "@x", "\tx", "<script>", 'a "quoted", name', "plain"]
    text = csv_text(["tenant", "tokens", "dollars"], [(name, -5, None) for name in names])
    rows = list(csv.reader(io.StringIO(text)))
    assert rows[0] == ["tenant", "tokens", "dollars"]
    assert [row[0] for row in rows[1:]] == ["'=1+1", "'+1", "'-1", "'@x", "'\tx", *names[5:]]
    assert {tuple(row[1:]) for row in rows[1:]} == {("-5", "")}


def test_a_row_is_a_card_of_its_first_cell_and_a_second_fact() -> None:
    row = (
        '<tr class="over">\n<td data-label="A"><a title="&gt;">1</a></td><td>2</td><td>3</td><td>4</td></tr>'
    )
    card = row.replace("</td>", "|</td>", 1).replace("<td>3", "<td data-second>3")
    columns = ["A", "B", ("C", "number"), "D"]
    assert re.sub("<button.*?</button>", "|", cards(row + row, columns)) == card + card
    assert second_fact(["A", ("B", "number"), ("C", "number second")]) == 2
    assert second_fact([("A", "number"), "B"]) == 1
    assert cards(row, columns[:3]) == row
