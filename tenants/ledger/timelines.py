"""Storage of packed timelines of finished requests, and of the descriptions that they refer to.

One row per request, opaque here. A description (of the server, of the key's terms) is named by a digest of
its content, so that requests share it. Purged by age and number, oldest first. No account depends on it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import astuple
from sqlalchemy import Connection, case, delete, select

from tenants.directory import queries
from tenants.ledger.batch_insert import insert_values
from tenants.storage.database import Database
from tenants.storage.tables import descriptions, ledger, tenants, timelines
from tenants.storage.upserts import insert

DIGEST_BYTES = 12
MAX_PURGED = 20_000
"""Rows per `purge`, so that other writes are not blocked for long."""


class StoredTimeline(msgspec.Struct, frozen=True):
    request_id: str
    tenant_id: str
    ended_us: int
    """Microseconds since 1970."""
    packed: bytes
    server: str | None = None
    """Id of the description of the server that ran it; None: not described."""
    terms: str | None = None
    """Id of the description of what its key was entitled to."""
    session: str | None = None
    """The session that it is a call of."""


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
    server: str | None = None
    terms: str | None = None
    """Ids, as in `StoredTimeline`."""


def description_id(content: bytes) -> str:
    """The name of a description: 16 characters of base64."""
    return base64.urlsafe_b64encode(hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()).decode()


async def add(
    database: Database, rows: Sequence[StoredTimeline], described: Mapping[str, bytes] | None = None
) -> None:
    """Inserts rows, and the `described` contents by id; existing rows stay. Raises `DatabaseUnavailable`."""
    if rows:
        await database.write(lambda connection: _add(connection, rows, described or {}))


async def find(database: Database, request_id: str) -> StoredTimeline | None:
    """The timeline of a request; None: missing or purged. Raises `DatabaseUnavailable`."""

    def look(connection: Connection) -> StoredTimeline | None:
        row = connection.execute(select(timelines).where(timelines.c.request_id == request_id)).first()
        return None if row is None else StoredTimeline(*row)

    return await database.read(look)


async def recorded(database: Database, *, from_us: int, to_us: int, most: int) -> list[RecordedTimeline]:
    """The first `most` that ended in [`from_us`, `to_us`), in that order. Raises `DatabaseUnavailable`."""

    def look(connection: Connection) -> list[RecordedTimeline]:
        settled = (ledger.c.request_id == timelines.c.request_id) & (ledger.c.kind == "settle")
        rows = connection.execute(
            select(
                tenants.c.name,
                tenants.c.weight,
                ledger.c.model,
                timelines.c.ended_us,
                timelines.c.packed,
                timelines.c.server,
                timelines.c.terms,
            )
            .join(ledger, settled)
            .join(tenants, tenants.c.id == timelines.c.tenant_id)
            .where(timelines.c.ended_us >= from_us, timelines.c.ended_us < to_us)
            .order_by(timelines.c.ended_us)
            .limit(most)
        )
        return [RecordedTimeline(*row) for row in rows]

    return await database.read(look)


async def servers(database: Database, *, from_us: int, to_us: int, most: int) -> list[tuple[int, str | None]]:
    """When the newest `most` of that time ended, and what ran each, oldest first. Raises
    `DatabaseUnavailable`."""

    def look(connection: Connection) -> list[tuple[int, str | None]]:
        rows = connection.execute(
            select(timelines.c.ended_us, timelines.c.server)
            .where(timelines.c.ended_us >= from_us, timelines.c.ended_us < to_us)
            .order_by(timelines.c.ended_us.desc())
            .limit(most)
        )
        return [(row.ended_us, row.server) for row in rows][::-1]

    return await database.read(look)


async def described(database: Database, ids: Collection[str]) -> dict[str, bytes]:
    """By id; missing ones are left out. Raises `DatabaseUnavailable`."""

    def look(connection: Connection) -> dict[str, bytes]:
        contents: dict[str, bytes] = {}
        for chunk in queries.chunks(sorted(ids)):
            rows = connection.execute(
                select(descriptions.c.id, descriptions.c.content).where(descriptions.c.id.in_(chunk))
            )
            contents |= {row.id: row.content for row in rows}
        return contents

    return await database.read(look)


async def purge(database: Database, *, before_us: int, most_rows: int) -> int:
    """Deletes timelines that ended before `before_us`, and the oldest beyond `most_rows`, at most
    `MAX_PURGED`, with unused descriptions. Returns how many timelines. Raises `DatabaseUnavailable`."""
    cutoff_us = await database.read(lambda connection: _cutoff_us(connection, before_us, most_rows))
    return await database.write(lambda connection: _purge(connection, cutoff_us))


def _add(connection: Connection, rows: Sequence[StoredTimeline], described: Mapping[str, bytes]) -> None:
    used_us: dict[str, int] = {}
    for row in rows:
        for digest in (row.server, row.terms):
            if digest is not None and digest in described:
                used_us[digest] = max(used_us.get(digest, 0), row.ended_us)
    if used_us:
        new = insert(connection, descriptions)
        newer = new.excluded.used_us
        connection.execute(
            new.on_conflict_do_update(
                index_elements=[descriptions.c.id],
                set_={"used_us": case((newer > descriptions.c.used_us, newer), else_=descriptions.c.used_us)},
            ),
            # In one order, so that two gateways never wait for each other.
            [
                {"id": digest, "used_us": used_us[digest], "content": described[digest]}
                for digest in sorted(used_us)
            ],
        )
    insert_values(connection, timelines, StoredTimeline.__struct_fields__, list(map(astuple, rows)))


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
    purged = connection.execute(delete(timelines).where(timelines.c.request_id.in_(oldest))).rowcount
    if purged < MAX_PURGED:
        connection.execute(delete(descriptions).where(descriptions.c.used_us < cutoff_us))
    return purged
