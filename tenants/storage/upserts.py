"""Inserts that may meet a row of the same key: left as it is, or added to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite


def insert(connection: Connection, table: Table) -> Any:
    """The dialect's INSERT, which knows ON CONFLICT."""
    return (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)


def add_counts(
    connection: Connection,
    table: Table,
    rows: Sequence[Mapping[str, Any]],
    *,
    replaced: Collection[str] = (),
) -> None:
    """Adds rows to counts: columns outside the primary key are summed, those in `replaced` overwritten."""
    if not rows:
        return
    keys = [column.name for column in table.primary_key]
    new = insert(connection, table)
    changed = {
        column.name: new.excluded[column.name]
        if column.name in replaced
        else column + new.excluded[column.name]
        for column in table.c
        if column.name not in keys
    }
    # The same order in every gateway, so that two of them never deadlock.
    ordered = sorted(rows, key=lambda row: [row[name] for name in keys])
    connection.execute(new.on_conflict_do_update(index_elements=keys, set_=changed), ordered)
