"""Cursors of lists: where a page ended, as an opaque text.

A cursor holds the name and filter of its list and the sort key of the last row shown, so that one of another
list is refused. A page begins after that key, whether or not its row is still there."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from sqlalchemy import ColumnElement, literal, tuple_

from tenants.errors import Invalid
from tenants.nouns import checks

T = TypeVar("T")

MAX_PAGE = 1_000
DEFAULT_PAGE = 100
PAGES = (
    f"At most `limit` rows, up to {MAX_PAGE}; `next_cursor` gives the next page as `cursor`, with the same"
    " filter."
)
SHORT_PAGES = (
    "One page looks at a bounded number of rows: where few match the filter it is shorter than `limit`, or"
    " empty, and goes on."
)
MAX_CURSOR = 8_000
"""Characters; a filter with every field at its longest has fewer."""
CURSOR = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_CURSOR}}}")

Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Text = Annotated[str, msgspec.Meta(max_length=256)]
Key = tuple[Number | Text, ...]
SortKey = tuple[int | str, ...]
"""The values that a list is sorted by, of one row."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some rows of a list. `next_cursor` None: there are no more now."""

    rows: list[T]
    next_cursor: str | None


def encode_cursor(list_name: str, filters: Mapping[str, Any], last: Sequence[int | str]) -> str:
    """The cursor that continues a list after the row with the sort key `last`."""
    packed = msgspec.json.encode((list_name, given(filters), tuple(last)))
    return base64.urlsafe_b64encode(packed).rstrip(b"=").decode()


def decode_cursor(list_name: str, filters: Mapping[str, Any], text: str, key: Any = Key) -> Any:
    """The last row's sort key, of type `key`. Raises `Invalid`, also if it is of another list or filter."""
    try:
        if CURSOR.fullmatch(text) is None:
            raise ValueError
        packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_")
        made_for, made_with, raw = msgspec.json.decode(packed, type=tuple[str, dict[str, Any], msgspec.Raw])
        last = msgspec.json.decode(raw, type=key) if made_for == list_name else ()
        if any(isinstance(value, str) and not value.isprintable() for value in last):
            raise ValueError  # PostgreSQL takes no NUL
    except ValueError:  # of base64, of UTF-8, and of what is in it
        raise Invalid(
            "cursor",
            "does not belong to this list: copy next_cursor of the page before, or leave it out for the first"
            " page",
        ) from None
    if made_for != list_name:
        raise Invalid(
            "cursor",
            f"continues the list of {made_for[:40]!r}, and this is the list of {list_name}: leave the cursor"
            " out to begin with the first page",
        )
    if made_with != given(filters):
        raise Invalid(
            "cursor",
            f"continues the list with {_described(made_with)}, and this one is asked with"
            f" {_described(given(filters))}: repeat the filter of the page before, or leave the cursor out to"
            " begin with the first page",
        )
    return last


def given(filters: Mapping[str, Any]) -> dict[str, Any]:
    """The filters that are set, as JSON gives them back: a tuple is a list."""
    wanted = {name: value for name, value in filters.items() if value is not None}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in wanted.items()}


def checked_limit(limit: int) -> int:
    """Raises `Invalid`."""
    return checks.whole(limit, MAX_PAGE, least=1, field="limit")


def page_of(
    items: Sequence[T],
    limit: int,
    list_name: str,
    filters: Mapping[str, Any],
    key_of: Callable[[T], Sequence[int | str]],
    *,
    scanned_to: Sequence[int | str] | None = None,
) -> Page[T]:
    """`items`: one more than `limit` if the list goes on. `scanned_to`: the last row read, to go on from."""
    rows = list(items[:limit])
    last = key_of(rows[-1]) if len(items) > limit else scanned_to
    return Page(rows, None if last is None else encode_cursor(list_name, filters, last))


def beyond(
    columns: Sequence[ColumnElement[Any]], last: Sequence[int | str], *, newest_first: bool = False
) -> ColumnElement[bool]:
    """SQL condition, served by an index: the row comes after the sort key `last`, in one direction."""
    left = tuple_(*columns)
    right = tuple_(*(literal(value, column.type) for column, value in zip(columns, last, strict=True)))
    return left < right if newest_first else left > right


def _described(filters: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={str(value)[:128]}" for name, value in filters.items()) or "no filter"
