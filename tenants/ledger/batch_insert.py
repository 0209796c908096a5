"""Inserts many ledger rows with one statement.

The gateways' hottest write. All queued rows go into one multi-row `INSERT` with driver-level parameters:
SQLAlchemy's per-row processing costs several times the row itself, and between two statements the interpreter
may switch threads. Existing rows are skipped."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from sqlalchemy import Connection, Table

from tenants.storage.database import execute_on_driver
from tenants.storage.tables import counter_sets, ledger

ROWS_PER_STATEMENT = 32
"""Rows per statement. Keeps its parameters below 999, the most that older builds of SQLite take."""
COLUMNS = tuple(column.name for column in ledger.columns if column.name != "id")
"""The order of a row's values; the id is assigned by the database."""

Values = tuple[Any, ...]


def insert_rows(connection: Connection, rows: Sequence[Values]) -> int:
    """Appends rows, values as `COLUMNS` (`detail` as JSON text); returns how many were new."""
    return insert_values(connection, ledger, COLUMNS, rows)


def insert_sets(connection: Connection, members: Sequence[tuple[str, str, str]]) -> None:
    """Appends members of counter sets: (gateway, set id, counter)."""
    insert_values(connection, counter_sets, ("gateway_id", "set_id", "counter"), members)


def insert_values(
    connection: Connection, table: Table, columns: tuple[str, ...], rows: Sequence[Values]
) -> int:
    """Appends rows to a table, values in the order of `columns`; returns how many were new."""
    new = 0
    for start in range(0, len(rows), ROWS_PER_STATEMENT):
        batch = rows[start : start + ROWS_PER_STATEMENT]
        text = _statement(connection.dialect.name, table.name, columns, len(batch))
        new += execute_on_driver(connection, text, tuple(chain.from_iterable(batch)))
    return new


@lru_cache(maxsize=4 * ROWS_PER_STATEMENT)
def _statement(dialect: str, table: str, columns: tuple[str, ...], rows: int) -> str:
    mark = "?" if dialect == "sqlite" else "%s"
    row = f"({', '.join([mark] * len(columns))})"
    return (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES {', '.join([row] * rows)} ON CONFLICT DO NOTHING"
    )
