"""How do many ledger rows get into the database in one statement?

The gateways' hottest write: two rows a request at least. Everything that waits goes in as one `INSERT` of
many rows, in the driver's own parameters: what a mapper does for each row costs several times the row itself,
and between two statements the interpreter may give the processor to another thread.

Rows that are there already are left alone, and counted out: how many were new is what the database says.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from sqlalchemy import Connection, Table

from tenants.storage.tables import counter_sets, ledger

ROWS_AT_ONCE = 32
"""In one statement. Its parameters stay below 999, which older builds of SQLite take at most."""
COLUMNS = tuple(column.name for column in ledger.columns if column.name != "id")
"""In the order in which a row's values are given; the id is the database's."""

Values = tuple[Any, ...]


def insert_rows(connection: Connection, rows: Sequence[Values]) -> int:
    """Appends ledger rows, their values by `COLUMNS` (`detail` as JSON text); returns how many were new."""
    return _insert(connection, ledger, COLUMNS, rows)


def insert_sets(connection: Connection, members: Sequence[tuple[str, str, str]]) -> None:
    """Notes which counters are in which sets: (gateway, set id, counter)."""
    _insert(connection, counter_sets, ("gateway_id", "set_id", "counter"), members)


def _insert(connection: Connection, table: Table, columns: tuple[str, ...], rows: Sequence[Values]) -> int:
    new = 0
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE]
        text = _statement(connection.dialect.name, table.name, columns, len(some))
        new += connection.exec_driver_sql(text, tuple(chain.from_iterable(some))).rowcount
    return new


@lru_cache(maxsize=4 * ROWS_AT_ONCE)
def _statement(dialect: str, table: str, columns: tuple[str, ...], rows: int) -> str:
    mark = "?" if dialect == "sqlite" else "%s"
    row = f"({', '.join([mark] * len(columns))})"
    return (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES {', '.join([row] * rows)} ON CONFLICT DO NOTHING"
    )
