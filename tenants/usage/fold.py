"""Folds ledger rows into the sums of usage, each exactly once.

The position and the sums change in one transaction, under a lock on the position's row: however many gateways
fold, and wherever one dies, no row is lost or counted twice. Never in a settlement: requests would wait.

On PostgreSQL ids become visible out of order: a transaction takes an id, another takes the next and commits
first. An id is final once every transaction that may hold it or a lower one has ended. An INSERT locks its
table (`ROW EXCLUSIVE`) before it takes an id, and keeps the lock until what it wrote is visible. Hence: note
the newest visible id, then the transactions that have locked the ledger for writing; when these have ended,
ids up to the noted one are final. (Not `pg_snapshot_xmin`: an INSERT that waits for another one's row of the
same unique key holds an id and has no transaction number yet.) SQLite has one writer at a time: whoever holds
the write lock sees every id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from sqlalchemy import Connection, Select, Text, cast, delete, func, select, text, update
from sqlalchemy.sql import ColumnElement

from tenants.storage.tables import CHARGES, CHARGES_BY_ID, ledger, usage_fold, usage_labels, usage_sums
from tenants.storage.upserts import add_counts, insert
from tenants.usage.sums import AMOUNTS, DAY_US, Charge, Grain, SumKey, sums_of

_WRITERS = text(
    "SELECT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND mode = 'RowExclusiveLock'"
    " AND granted AND relation = 'ledger'::regclass AND pid IS DISTINCT FROM pg_backend_pid()"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
ROWS = 200
"""Charges folded in one transaction, which settlements may have to wait for."""
HOURS_KEPT_US = 90 * DAY_US
_KEYS = SumKey._fields
_charges = select(
    *(ledger.c[name] for name in ("id", *Charge._fields[1:-2])),
    *(cast(ledger.c[name], Text) for name in Charge._fields[-2:]),
)


@dataclass(frozen=True, slots=True)
class WaitingIds:
    """Ids up to `newest_id` are final once `transactions` have ended."""

    newest_id: int = 0
    transactions: frozenset[str] = frozenset()


def step(final_id: int, waiting: WaitingIds, newest_id: int, running: Set[str]) -> tuple[int, WaitingIds]:
    """The final id, and what to wait for. `running`: writing transactions, read after `newest_id`. Pure."""
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


@dataclass(frozen=True, slots=True)
class Position:
    folded_id: int
    folded_us: int
    """The newest instant that is folded; 0: none."""
    hours_from_us: int
    """Hours that began earlier were deleted."""
    waiting: WaitingIds
    rebuild_id: str


@dataclass(frozen=True, slots=True)
class FoldRound:
    charges: int
    has_more: bool
    """Rows are left that can be folded now."""


def position(connection: Connection, *, locked: bool = False, waits: bool = False) -> Position | None:
    """The position; `locked` until the transaction ends, where no other process has it (None then) or, with
    `waits`, after waiting for it."""
    query = select(usage_fold)
    if locked:
        query = query.with_for_update(skip_locked=not waits)
    row = connection.execute(query).mappings().first()
    if row is None:
        return None
    return Position(
        row["folded_id"],
        row["folded_us"],
        row["hours_from_us"],
        WaitingIds(row["waiting_id"], frozenset(row["waiting_for"])),
        row["rebuild_id"],
    )


def unfolded_since_us(connection: Connection) -> int | None:
    """When the first ledger row beyond the position was written; None: there is none."""
    at = position(connection)
    if at is None:
        return None
    beyond = select(ledger.c.at_us).where(ledger.c.id > at.folded_id).order_by(ledger.c.id).limit(1)
    return connection.execute(beyond).scalar()


def is_behind(connection: Connection) -> bool:
    return unfolded_since_us(connection) is not None


def fold(connection: Connection, most: int = ROWS) -> FoldRound:
    """In a writing transaction."""
    at = position(connection, locked=True)
    if at is None:
        return FoldRound(0, has_more=False)
    final_id, waiting = look(connection, at.folded_id, at.waiting)
    charges = charges_beyond(connection, at.folded_id, ledger.c.id <= final_id, most=most)
    has_more = len(charges) == most
    sums = sums_of(charges, at.hours_from_us)
    add(connection, sums.amounts)
    add_labels(connection, sums.labels)
    connection.execute(
        update(usage_fold).values(
            folded_id=charges[-1].ledger_id if has_more else max(at.folded_id, final_id),
            folded_us=max(at.folded_us, sums.newest_us),
            # What was final before this round is not looked for again: the next round begins there.
            waiting_id=final_id if has_more else waiting.newest_id,
            waiting_for=[] if has_more else sorted(waiting.transactions),
        )
    )
    return FoldRound(len(charges), has_more)


def charges_beyond(
    connection: Connection, ledger_id: int, *conditions: ColumnElement[bool], most: int
) -> list[Charge]:
    """The first `most` charging rows behind `ledger_id`, by id."""
    query = _charges.where(CHARGES_BY_ID, ledger.c.id > ledger_id, *conditions)
    return list(starmap(Charge, connection.execute(query.order_by(ledger.c.id).limit(most))))


def charges_query(*conditions: ColumnElement[bool]) -> Select[Any]:
    """Ledger rows that charge; columns in the order of `Charge`."""
    return _charges.where(CHARGES, *conditions)


def add(connection: Connection, amounts: Mapping[SumKey, Sequence[int]]) -> None:
    """Adds to sums; missing ones begin at 0."""
    columns = (*_KEYS, *AMOUNTS)
    rows = [dict(zip(columns, (*key, *added), strict=True)) for key, added in amounts.items()]
    add_counts(connection, usage_sums, rows)


def add_labels(connection: Connection, labels: Mapping[str, Mapping[str, str]]) -> None:
    """Adds sets of labels; existing ones stay."""
    rows = [
        {"label_set": set_id, "name": name, "value": value}
        for set_id in sorted(labels)
        for name, value in sorted(labels[set_id].items())
    ]
    if rows:
        connection.execute(insert(connection, usage_labels).on_conflict_do_nothing(), rows)


def drop_zeros(connection: Connection, keys: Sequence[SumKey]) -> None:
    is_zero = [usage_sums.c[name] == 0 for name in AMOUNTS]
    for key in keys:
        is_it = [usage_sums.c[name] == value for name, value in key._asdict().items()]
        connection.execute(delete(usage_sums).where(*is_it, *is_zero))


def purge_hours(connection: Connection, now_us: int) -> bool:
    """Deletes the oldest day of hours, if all of them are old enough; returns whether it did."""
    at = position(connection, locked=True)
    is_hour = usage_sums.c.grain == Grain.HOUR.value
    oldest_us = connection.execute(select(func.min(usage_sums.c.start_us)).where(is_hour)).scalar()
    if at is None or oldest_us is None:
        return False
    until_us = oldest_us // DAY_US * DAY_US + DAY_US
    if until_us > now_us - HOURS_KEPT_US:
        return False
    connection.execute(delete(usage_sums).where(is_hour, usage_sums.c.start_us < until_us))
    connection.execute(update(usage_fold).values(hours_from_us=max(at.hours_from_us, until_us)))
    return True
