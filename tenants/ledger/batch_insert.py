"""How do many ledger rows get into the database in one statement?

The gateways' hottest write: two rows a request at least. Everything that waits goes in as one `INSERT` of
many rows, in the driver's own parameters: what a mapper does for each row costs several times the row itself,
and between two statements the interpreter may give the processor to another thread.

Rows that are there already are left alone, and counted out: how many were new is what the database says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import Any

from sqlalchemy import Connection, Table

from tenants.storage import database
from tenants.storage.tables import counter_sets, ledger

ROWS_AT_ONCE = 32
"""In one statement. Its parameters stay below 999, which older builds of SQLite take at most."""
EPOCH_SETTING = "quota_epoch"
"""The setting that holds the epoch in force."""
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
        new += database.execute(connection, text, _flat(some))
    return new


def _flat(rows: Iterable[Values]) -> Values:
    return tuple(chain.from_iterable(rows))


@lru_cache(maxsize=4 * ROWS_AT_ONCE)
def _statement(dialect: str, table: str, columns: tuple[str, ...], rows: int) -> str:
    mark = "?" if dialect == "sqlite" else "%s"
    row = f"({', '.join([mark] * len(columns))})"
    return (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES {', '.join([row] * rows)} ON CONFLICT DO NOTHING"
    )


# How do ledger rows become durable in SQLite with one call?
#
# Each statement gives the interpreter's lock away and takes it back, and an event loop that is busy hands it
# over only after milliseconds, while every request waits for the commit. A transaction of rows, of new sets
# of counters and of the epoch they are held under takes five. One `INSERT` outside of a transaction is a
# transaction by itself: checked, written, committed and synced within one call.
#
# So the rows go into a view of this connection, whose triggers do for each what `batch_insert.py` and the
# ledger's look at the epoch do. Where anything is not as it should be (a row is there already, its epoch is
# over) nothing is changed, and the plain way finds out what.

_VIEW = "ledger_appended"
_GIVEN = (*COLUMNS, "new_counters", "epoch")

_CREATE_VIEW = f"CREATE TEMP VIEW {_VIEW} AS SELECT {', '.join(f'NULL AS {name}' for name in _GIVEN)}"
_CREATE_TRIGGER = f"""
    CREATE TEMP TRIGGER {_VIEW}_row INSTEAD OF INSERT ON {_VIEW} BEGIN
        SELECT RAISE(ABORT, 'the epoch has ended') WHERE NEW.epoch != ''
            AND NEW.epoch != coalesce((SELECT value FROM settings WHERE name = '{EPOCH_SETTING}'), '');
        INSERT INTO ledger ({", ".join(COLUMNS)}) VALUES ({", ".join(f"NEW.{name}" for name in COLUMNS)});
    END
"""
_CREATE_SET_TRIGGER = f"""
    CREATE TEMP TRIGGER {_VIEW}_set INSTEAD OF INSERT ON {_VIEW} WHEN NEW.new_counters IS NOT NULL BEGIN
        INSERT INTO counter_sets (gateway_id, set_id, counter)
            SELECT NEW.gateway_id, NEW.counter_set, value FROM json_each(NEW.new_counters) WHERE true
            ON CONFLICT DO NOTHING;
    END
"""


def insert_at_once(connection: Connection, rows: Sequence[Values]) -> None:
    """Appends rows and makes them durable, all or none: each its values by `ledger_insert.COLUMNS`, then the
    counters of its set (a JSON array; None: the set is there) and its epoch, or "". `connection` must be in
    no transaction, and `rows` no more than `ROWS_AT_ONCE`.

    Raises `IntegrityError`, having changed nothing, where a row exists or its epoch is not the one in force;
    `DBAPIError` for what else goes wrong, and then nobody knows whether it was committed.
    """
    if _VIEW not in connection.info:
        for statement in (_CREATE_VIEW, _CREATE_TRIGGER, _CREATE_SET_TRIGGER):
            database.execute(connection, statement)
        connection.info[_VIEW] = True
    database.execute(connection, _statement_at_once(len(rows)), tuple(chain.from_iterable(rows)))


@cache
def _statement_at_once(rows: int) -> str:
    row = f"({', '.join('?' * len(_GIVEN))})"
    return f"INSERT INTO {_VIEW} ({', '.join(_GIVEN)}) VALUES {', '.join([row] * rows)}"
