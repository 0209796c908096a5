"""Bounds how many rows one page looks at.

Each list is read along an index that serves one filter; the others are checked row by row. Where few rows
match, the page ends at the bound, and its cursor goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, TextClause, select

from tenants.errors import Invalid
from tenants.instants import to_us
from tenants.nouns import checks

MOST_SCANNED = 5_000
"""Rows of an index that one page looks at."""


def end_of_scan(
    connection: Connection,
    order: Sequence[ColumnElement[int] | ColumnElement[str]],
    conditions: Sequence[ColumnElement[bool] | TextClause],
    *,
    newest_first: bool = True,
) -> tuple[int | str, ...] | None:
    """The sort key of the last row that a page may scan, of those by `conditions`; None: there are fewer."""
    in_order = [column.desc() if newest_first else column.asc() for column in order]
    query: Any = select(*order).where(*conditions).order_by(*in_order)
    row = connection.execute(query.offset(MOST_SCANNED - 1).limit(1)).first()
    return None if row is None else tuple(row)


def between(at_us: ColumnElement[int], since: str | None, until: str | None) -> list[ColumnElement[bool]]:
    """From `since` (ISO 8601 with a time zone) until before `until`. Raises `Invalid`."""
    bounds = (("from", since), ("to", until))
    instants = {name: to_us(checks.instant(name, text)) for name, text in bounds if text is not None}
    if len(instants) == 2 and instants["from"] >= instants["to"]:
        raise Invalid("from", "must be before 'to'")
    return [at_us >= value if name == "from" else at_us < value for name, value in instants.items()]
