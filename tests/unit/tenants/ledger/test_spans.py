"""Digests of ledger rows: roots that others compute as well, and differences that name the kind."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from pymerkle import InmemoryTree

from tenants.errors import Invalid
from tenants.ledger.spans import FIELDS, SpanDigest, differences, digest_of, span_from
from tenants.storage.tables import ledger

KINDS = ("reserve", "top_up", "settle", "credit")


def row(ledger_id: int, kind: str = "settle", **changes: Any) -> tuple[Any, ...]:
    values = dict.fromkeys(FIELDS, 7) | {
        "id": ledger_id, "kind": kind, "labels": None, "detail": '{"a": 1.0}',
    }  # fmt: skip
    return tuple((values | {"cost_nanousd": 3_000} | changes).values())


ROWS = [row(number, KINDS[number % 4]) for number in range(1, 42)]
SPAN = digest_of(1, 41, ROWS)


def test_a_row_s_bytes_have_every_column() -> None:
    """A column that is added is another format: digests of before must not change."""
    assert tuple(column.name for column in ledger.columns) == FIELDS


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_the_root_that_pymerkle_computes_of_its_rows(kind: str) -> None:
    theirs = InmemoryTree(algorithm="sha256")
    own = [each for each in ROWS if each[2] == kind]
    for each in own:
        theirs.append_entry(json.dumps(each, separators=(",", ":")).encode())
    found = SPAN.kinds[kind]
    assert base64.b64decode(found.root) == theirs.get_root()
    assert (found.rows, found.cost_nanousd) == (len(own), 3_000 * len(own))


@pytest.mark.parametrize("name", FIELDS)
def test_any_column_that_is_changed_is_found_and_its_kind_named(name: str) -> None:
    at = FIELDS.index(name)
    other: Any = {"kind": "adjust", "detail": '{"a": 1}', "labels": "{}"}.get(name, 8)
    changed = [each if each[0] != 6 else (*each[:at], other, *each[at + 1 :]) for each in ROWS]
    found = differences(SPAN, digest_of(1, 41, changed))
    assert [each.kind for each in found] == (["settle", "adjust"] if name == "kind" else ["settle"])


def test_what_differs_is_told_with_its_money() -> None:
    def told(rows: list[tuple[Any, ...]]) -> list[tuple[str, str]]:
        return [(each.kind, each.detail) for each in differences(SPAN, digest_of(1, 41, rows))]

    assert told(ROWS) == []
    cheaper = [each if each[0] != 6 else row(6, cost_nanousd=2_999) for each in ROWS]
    of_all = "of its 10 rows one or more were changed"
    assert told(cheaper) == [("settle", f"{of_all}; the sum of their costs is off by -1 nano-dollars")]
    less = [each for each in ROWS if each[0] != 7]
    assert told(less) == [
        ("credit", "10 rows were digested, there are 9; the sum of their costs is off by -3000 nano-dollars")
    ]
    more = [*ROWS, row(42, "credit", cost_nanousd=0)]
    assert told(more) == [("credit", "10 rows were digested, there are 11")]
    exchanged = [*ROWS[:1], ROWS[5], *ROWS[2:5], ROWS[1], *ROWS[6:]]
    assert told(exchanged) == [("settle", of_all)]


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        {},
        SPAN.as_json() | {"first_id": "1"},
        SPAN.as_json() | {"more": 1},
        SPAN.as_json() | {"kinds": {"settle": {}}},
        SPAN.as_json() | {"format": 2},
    ],
)
def test_what_is_no_digest_is_refused(said: Any) -> None:
    with pytest.raises(Invalid, match="ledger digest"):
        span_from(said)
    assert span_from(json.loads(json.dumps(SPAN.as_json()))) == SPAN


def test_a_span_without_rows_is_a_digest_too() -> None:
    assert digest_of(5, 9, []) == SpanDigest(5, 9, {})
