"""The ledger id up to which no row can appear any more.

On PostgreSQL ids become visible out of order: a transaction takes an id, another takes the next and commits
first. An id is final once every transaction that may hold it or a lower one has ended. An INSERT locks its
table (`ROW EXCLUSIVE`) before it takes an id, and keeps the lock until what it wrote is visible. Hence: note
the newest visible id, then the transactions that have locked the ledger for writing; when these have ended,
ids up to the noted one are final.

(Not `pg_snapshot_xmin`: an INSERT that waits for another one's row of the same unique key holds an id and has
no transaction number yet.) SQLite has one writer at a time: whoever holds the write lock sees every id.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from sqlalchemy import Connection, func, select, text

from tenants.storage.tables import ledger

_WRITERS = text(
    "SELECT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND mode = 'RowExclusiveLock'"
    " AND granted AND relation = 'ledger'::regclass AND pid IS DISTINCT FROM pg_backend_pid()"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


@dataclass(frozen=True, slots=True)
class WaitingIds:
    """Ids up to `newest_id` are final once `transactions` have ended."""

    newest_id: int = 0
    transactions: frozenset[str] = frozenset()


def step(final_id: int, waiting: WaitingIds, newest_id: int, running: Set[str]) -> tuple[int, WaitingIds]:
    """The final id, and what to wait for next. `running`: writing transactions, read after `newest_id`.
    Pure."""
    if waiting.transactions & running:
        return final_id, WaitingIds(waiting.newest_id, waiting.transactions & running)
    if not running:
        return newest_id, WaitingIds()
    return max(final_id, waiting.newest_id), WaitingIds(newest_id, frozenset(running))


def look(connection: Connection, final_id: int, waiting: WaitingIds) -> tuple[int, WaitingIds]:
    """The same, of the ledger now. In a READ COMMITTED transaction; on SQLite with the write lock."""
    newest_id = connection.execute(select(func.max(ledger.c.id))).scalar() or 0
    running: Set[str] = frozenset()
    if connection.dialect.name == "postgresql":
        # In this order: see above. This transaction's own rows are seen, and committed with what it folds.
        running = frozenset(connection.execute(_WRITERS).scalars())
    return step(final_id, waiting, newest_id, running)
