"""Storage of packed timelines of finished requests.

One row per request; the content is opaque bytes here. Kept for some days and up to a number of rows, the
oldest purged first. Not part of the accounts: losing a timeline loses an explanation, never a token or a
nano-dollar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import Connection, delete, select
from sqlalchemy.dialects import postgresql, sqlite

from tenants.storage.database import Database
from tenants.storage.tables import ledger, tenants, timelines

MAX_PURGED = 20_000
"""Rows removed by one `purge`, so that it does not block other writes for long."""


class StoredTimeline(msgspec.Struct, frozen=True):
    """One row."""

    request_id: str
    tenant_id: str
    ended_us: int
    """Microseconds since 1970."""
    packed: bytes


@dataclass(frozen=True, slots=True)
class RecordedTimeline:
    """A timeline with its request's tenant and model."""

    tenant: str
    """Its name."""
    weight: float
    """The current one."""
    model: str
    ended_us: int
    packed: bytes


async def add(database: Database, rows: Sequence[StoredTimeline]) -> None:
    """Inserts rows; existing ones stay unchanged. Raises `DatabaseUnavailable`."""
    if rows:
        await database.write(lambda connection: _add(connection, rows))


async def find(database: Database, request_id: str) -> StoredTimeline | None:
    """The timeline of a request; None: missing or purged. Raises `DatabaseUnavailable`."""

    def look(connection: Connection) -> StoredTimeline | None:
        row = connection.execute(select(timelines).where(timelines.c.request_id == request_id)).first()
        return None if row is None else StoredTimeline(*row)

    return await database.read(look)


async def recorded(database: Database, *, from_us: int, to_us: int, most: int) -> list[RecordedTimeline]:
    """The first `most` requests that ended in [`from_us`, `to_us`), in that order. Raises
    `DatabaseUnavailable`."""

    def look(connection: Connection) -> list[RecordedTimeline]:
        settled = (ledger.c.request_id == timelines.c.request_id) & (ledger.c.kind == "settle")
        rows = connection.execute(
            select(tenants.c.name, tenants.c.weight, ledger.c.model, timelines.c.ended_us, timelines.c.packed)
            .join(ledger, settled)
            .join(tenants, tenants.c.id == timelines.c.tenant_id)
            .where(timelines.c.ended_us >= from_us, timelines.c.ended_us < to_us)
            .order_by(timelines.c.ended_us)
            .limit(most)
        )
        return [RecordedTimeline(*row) for row in rows]

    return await database.read(look)


async def purge(database: Database, *, before_us: int, most_rows: int) -> int:
    """Deletes timelines that ended before `before_us`, and the oldest beyond `most_rows`; at most
    `MAX_PURGED` per call. Returns how many. Raises `DatabaseUnavailable`."""
    cutoff_us = await database.read(lambda connection: _cutoff_us(connection, before_us, most_rows))
    return await database.write(lambda connection: _purge(connection, cutoff_us))


def _add(connection: Connection, rows: Sequence[StoredTimeline]) -> None:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    connection.execute(
        dialect.insert(timelines).on_conflict_do_nothing(),
        [
            {
                "request_id": row.request_id,
                "tenant_id": row.tenant_id,
                "ended_us": row.ended_us,
                "packed": row.packed,
            }
            for row in rows
        ],
    )


def _cutoff_us(connection: Connection, before_us: int, most_rows: int) -> int:
    newest_too_many = connection.execute(
        select(timelines.c.ended_us).order_by(timelines.c.ended_us.desc()).offset(most_rows).limit(1)
    ).scalar()
    return before_us if newest_too_many is None else max(before_us, newest_too_many + 1)


def _purge(connection: Connection, cutoff_us: int) -> int:
    oldest = (
        select(timelines.c.request_id)
        .where(timelines.c.ended_us < cutoff_us)
        .order_by(timelines.c.ended_us)
        .limit(MAX_PURGED)
    )
    return connection.execute(delete(timelines).where(timelines.c.request_id.in_(oldest))).rowcount
