"""Cursors belong to one list with one filter, and a client's own inventions are refused."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from tenants.admin.cursor import MAX_CURSOR, Number, Text, decode_cursor, encode_cursor, page_of
from tenants.errors import Invalid
from tenants.resources.records.audit import AuditQuery
from tenants.resources.records.ended import EndedQuery

ACTS: dict[str, Any] = {"act": "tenant", "since": "2026-01-31T18:00:00+01:00"}
KEY = tuple[Number, Text]


def packed(value: object) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(value)).decode()


def test_a_cursor_continues_its_own_list() -> None:
    assert decode_cursor("audit", ACTS, encode_cursor("audit", ACTS, (41,)), tuple[Number]) == (41,)
    labels = {"labels": ("team=ads", "env=prod")}
    assert decode_cursor("usage", labels, encode_cursor("usage", labels, (41,)), tuple[Number]) == (41,)
    assert decode_cursor("keys", {"tenant": None}, encode_cursor("keys", {}, (0, "é")), KEY) == (0, "é")


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({}, "no filter"),
        ({"act": "tenant"}, "asked with act=tenant:"),
        (ACTS | {"order": "oldest"}, "order=oldest"),
    ],
)
def test_a_cursor_of_another_filter_names_both_and_the_way_out(other: dict[str, Any], named: str) -> None:
    with pytest.raises(Invalid) as caught:
        decode_cursor("audit", other, encode_cursor("audit", ACTS, (41,)), tuple[Number])
    assert caught.value.field == "cursor"
    assert "act=tenant, since=2026-01-31T18:00:00+01:00" in caught.value.message
    assert named in caught.value.message
    assert "leave the cursor out" in caught.value.message


def test_a_cursor_of_another_list_names_both() -> None:
    with pytest.raises(Invalid, match="list of 'keys', and this is the list of limits") as caught:
        decode_cursor("limits", {}, encode_cursor("keys", {}, (1, "key_1")), KEY)
    assert caught.value.field == "cursor"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "é",
        "A" * (MAX_CURSOR + 1),
        base64.urlsafe_b64encode(b"\xff\xfe").decode(),
        packed(["keys", {}]),
        packed(["keys", {}, [1]]),
        packed(["keys", {}, ["1", "key_1"]]),
        packed(["keys", {}, [2**63, "key_1"]]),
        packed(["keys", {}, [1.5, "key_1"]]),
        packed(["keys", {}, [1, "a\0b"]]),
        packed(["keys", {}, [1, "x" * 257]]),
        packed(["keys", {}, [1, "key_1", 2]]),
    ],
)
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="next_cursor of the page before"):
        decode_cursor("keys", {}, text, KEY)


@pytest.mark.parametrize("query", [AuditQuery, EndedQuery])
def test_the_longest_filter_fits_into_a_cursor(query: type[msgspec.Struct]) -> None:
    filters = dict.fromkeys(query.__struct_fields__, "é" * 256)
    assert len(encode_cursor("ended requests", filters, (2**63 - 1, "x" * 80))) <= MAX_CURSOR


def test_a_page_goes_on_after_its_last_row_or_after_the_last_one_looked_at() -> None:
    def last(page: Any) -> Any:
        return page.next_cursor and decode_cursor("n", {}, page.next_cursor, tuple[Number])

    def key(row: int) -> tuple[int]:
        return (row,)

    page = page_of([1, 2, 3], 2, "n", {}, key)
    assert (page.rows, last(page)) == ([1, 2], (2,))
    assert last(page_of([1, 2], 2, "n", {}, key)) is None
    assert last(page_of([1, 2], 2, "n", {}, key, scanned_to=(9,))) == (9,)
    assert last(page_of([1, 2, 3], 2, "n", {}, key, scanned_to=(9,))) == (2,)
