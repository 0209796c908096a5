"""Requests and stored answers by `Idempotency-Key`.

A row is claimed before any budget is held, so that only one gateway runs a request; at its end it gets the
answer, or is deleted where nothing was charged. Keys belong to the API key that sent them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import ColumnElement, Connection, RowMapping, and_, delete, func, select, update

from tenants.directory import queries
from tenants.storage.database import Database
from tenants.storage.tables import idempotent_answers as table
from tenants.storage.upserts import insert

MAX_KEY_CHARACTERS = 255
MAX_PURGED = 10_000
FULL = 0.875
"""Of a tenant's bytes; above it no key is claimed, so that the answers under way find room."""
_pack, _unpack = msgspec.msgpack.encode, msgspec.msgpack.Decoder(list[bytes]).decode


class TooManyKeys(Exception):
    """An API key has the largest allowed number of idempotency keys in use."""

    def __init__(self, most: int) -> None:
        super().__init__(f"{most} idempotency keys of this API key are in use, the limit")
        self.most = most


class AnswersTooLarge(Exception):
    """A tenant has as many bytes of answers kept as are allowed."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(f"{most_bytes} bytes of answers are kept for this tenant, the limit")
        self.most_bytes = most_bytes


@dataclass(frozen=True, slots=True)
class Scope:
    key_id: str
    idempotency_key: str
    tenant_id: str


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The answer as sent. `pieces` None: too large to keep."""

    status: int
    headers: Mapping[str, str]
    pieces: Sequence[bytes] | None


@dataclass(frozen=True, slots=True)
class Claimed:
    """An existing claim. `answer` None: its request is not known to have ended."""

    fingerprint: str
    request_id: str
    gateway_id: str
    answer: StoredAnswer | None


class IdempotentAnswers:
    """Reads and writes rows. Every method raises `DatabaseUnavailable`."""

    def __init__(self, database: Database, *, max_per_key: int, max_bytes: int) -> None:
        """`max_per_key`: rows per API key; `max_bytes`: of the answers of a tenant, compressed."""
        self._database = database
        self._max_per_key = max_per_key
        self._max_bytes = max_bytes

    async def claim(
        self,
        scope: Scope,
        fingerprint: str,
        request_id: str,
        gateway_id: str,
        *,
        now_us: int,
        expires_us: int,
        instead_of: str | None = None,
    ) -> Claimed | None:
        """Claims the key durably; None on success, else the existing claim. `instead_of`: a request whose
        claim is taken over: it never began, its gateway is gone. Raises `TooManyKeys`, `AnswersTooLarge`."""

        def write(connection: Connection) -> Claimed | None:
            gone = table.c.expires_us <= now_us
            if instead_of is not None:
                gone = gone | and_(table.c.request_id == instead_of, table.c.status == 0)
            connection.execute(delete(table).where(_is(scope), gone))
            claimed = connection.execute(
                insert(connection, table)
                .values(
                    key_id=scope.key_id,
                    idempotency_key=scope.idempotency_key,
                    fingerprint=fingerprint,
                    request_id=request_id,
                    gateway_id=gateway_id,
                    tenant_id=scope.tenant_id,
                    status=0,
                    headers={},
                    expires_us=expires_us,
                )
                .on_conflict_do_nothing()
                .returning(table.c.request_id)
            ).first()
            if claimed is None:
                return _claimed(connection.execute(select(table).where(_is(scope))).mappings().one())
            if queries.count(connection, table, table.c.key_id == scope.key_id) > self._max_per_key:
                # Raising rolls the insert back.
                raise TooManyKeys(self._max_per_key)
            if _kept_bytes(connection, scope.tenant_id) >= FULL * self._max_bytes:
                raise AnswersTooLarge(self._max_bytes)
            return None

        return await self._database.write(write)

    async def is_claimed(self, key_id: str, idempotency_key: str, now_us: int) -> bool:
        """Whether a request with this key runs or has ended."""
        query = select(table.c.key_id).where(
            table.c.key_id == key_id,
            table.c.idempotency_key == idempotency_key,
            table.c.expires_us > now_us,
        )
        return await self._database.read(lambda connection: connection.execute(query).first() is not None)

    async def keep(self, scope: Scope, request_id: str, answer: StoredAnswer) -> bool:
        """Stores the answer, its pieces only within the tenant's `max_bytes`. False: the claim was lost."""
        pieces = None if answer.pieces is None else zlib.compress(_pack(list(answer.pieces)))
        head_bytes = len(_pack(dict(answer.headers)))

        def write(connection: Connection) -> bool:
            left = self._max_bytes - _kept_bytes(connection, scope.tenant_id)
            is_kept = pieces is not None and head_bytes + len(pieces) <= left
            kept = connection.execute(
                update(table)
                .where(_is(scope), table.c.request_id == request_id, table.c.status == 0)
                .values(
                    status=answer.status,
                    headers=dict(answer.headers),
                    pieces=pieces if is_kept else None,
                    kept_bytes=head_bytes + (len(pieces) if pieces is not None and is_kept else 0),
                )
            )
            return kept.rowcount == 1

        return await self._database.write(write)

    async def release(self, scope: Scope, request_id: str) -> None:
        def write(connection: Connection) -> None:
            connection.execute(
                delete(table).where(_is(scope), table.c.request_id == request_id, table.c.status == 0)
            )

        await self._database.write(write)

    async def purge(self, now_us: int) -> int:
        def write(connection: Connection) -> int:
            expired = list(
                connection.execute(
                    select(table.c.key_id, table.c.idempotency_key)
                    .where(table.c.expires_us <= now_us)
                    .limit(MAX_PURGED)
                )
            )
            for key_id, idempotency_key in expired:
                connection.execute(
                    delete(table).where(
                        table.c.key_id == key_id,
                        table.c.idempotency_key == idempotency_key,
                        table.c.expires_us <= now_us,
                    )
                )
            return len(expired)

        return await self._database.write(write)


def _kept_bytes(connection: Connection, tenant_id: str) -> int:
    query = select(func.coalesce(func.sum(table.c.kept_bytes), 0)).where(table.c.tenant_id == tenant_id)
    return int(connection.execute(query).scalar_one())


def _claimed(row: RowMapping) -> Claimed:
    answer = None
    if row["status"]:
        pieces = None if row["pieces"] is None else _unpack(zlib.decompress(row["pieces"]))
        answer = StoredAnswer(row["status"], row["headers"], pieces)
    return Claimed(row["fingerprint"], row["request_id"], row["gateway_id"], answer)


def _is(scope: Scope) -> ColumnElement[bool]:
    return and_(table.c.key_id == scope.key_id, table.c.idempotency_key == scope.idempotency_key)
