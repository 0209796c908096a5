"""How do ledger rows become durable in SQLite with one call?

Each statement gives the interpreter's lock away and takes it back, and an event loop that is busy hands it
over only after milliseconds, while every request waits for the commit. A transaction of rows, of new sets of
counters and of the epoch they are held under takes five. One `INSERT` outside of a transaction is a
transaction by itself: checked, written, committed and synced within one call.

So the rows go into a view of this connection, whose triggers do for each what `ledger_insert.py` and the
ledger's look at the epoch do. Where anything is not as it should be (a row is there already, its epoch is
over) nothing is changed, and the plain way finds out what.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain

from sqlalchemy import Connection

from tenants import driver
from tenants.ledger_insert import COLUMNS, EPOCH_SETTING, Values

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
            driver.execute(connection, statement)
        connection.info[_VIEW] = True
    driver.execute(connection, _statement(len(rows)), tuple(chain.from_iterable(rows)))


@cache
def _statement(rows: int) -> str:
    row = f"({', '.join('?' * len(_GIVEN))})"
    return f"INSERT INTO {_VIEW} ({', '.join(_GIVEN)}) VALUES {', '.join([row] * rows)}"
