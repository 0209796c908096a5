"""Admin acts on replicas: take one out of rotation, and back.

A drain holds in every gateway of the database, over restarts, until it is resumed. A replica is known by
model and name (`Upstream.name`), wherever it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from tenants.admin.audit import Actor
from tenants.admin.commands import ReplicaDrain
from tenants.admin.transaction import AdminActs, Change, IfMatch
from tenants.directory import queries
from tenants.errors import Invalid, NotFound
from tenants.instants import from_us
from tenants.nouns import checks
from tenants.storage import tables

MAX_DRAINS = 1_000


@dataclass(frozen=True, slots=True)
class Drain:
    """A replica that gets no new requests."""

    pool: str
    """The model's name."""
    replica: str
    since_us: int
    by: str
    reason: str = ""

    @property
    def identity(self) -> tuple[str, str]:
        return self.pool, self.replica

    def as_json(self) -> dict[str, Any]:
        return {
            "pool": self.pool,
            "replica": self.replica,
            "since": from_us(self.since_us).isoformat(),
            "by": self.by,
            "reason": self.reason,
        }


class DrainActs(AdminActs):
    async def drain(
        self,
        actor: Actor | str,
        pool: str,
        replica: str,
        wanted: ReplicaDrain,
        *,
        if_match: IfMatch = None,
    ) -> Drain:
        """Drains a replica. Of one that is drained already only actor and reason change."""
        reason = checks.reason(wanted.reason) if wanted.reason else ""
        by = actor if isinstance(actor, str) else actor.name

        def change(connection: Connection, now_us: int) -> Change[Drain]:
            before = _find(connection, pool, replica)
            if before is None and queries.count(connection, tables.drains) >= MAX_DRAINS:
                raise Invalid(
                    "replica",
                    f"the limit of {MAX_DRAINS} drained replicas is reached: resume the ones that are gone",
                )
            since_us = now_us if before is None else before.since_us
            after = Drain(pool, replica, since_us, by, reason)
            row = {"since_us": since_us, "by": by, "reason": reason}
            connection.execute(
                insert(tables.drains).values(pool=pool, replica=replica, **row)
                if before is None
                else update(tables.drains).where(*_is(pool, replica)).values(**row)
            )
            return Change(after, replica, None, None if before is None else before.as_json(), after.as_json())

        return await self._transactions.act(actor, "upstream.drain", change, if_match)

    async def resume(self, actor: Actor | str, pool: str, replica: str, *, if_match: IfMatch = None) -> Drain:
        """Ends a drain, and returns it. Raises `NotFound`."""

        def change(connection: Connection, now_us: int) -> Change[Drain]:
            before = _find(connection, pool, replica)
            if before is None:
                raise NotFound("drain", f"{replica} of {pool}")
            connection.execute(delete(tables.drains).where(*_is(pool, replica)))
            return Change(before, before.replica, None, before.as_json())

        return await self._transactions.act(actor, "upstream.resume", change, if_match)

    async def all(self) -> list[Drain]:
        """Every replica that is drained, the oldest first."""
        columns = tables.drains.c
        query = select(tables.drains).order_by(columns.since_us, columns.pool, columns.replica)
        return await self._transactions.read(
            lambda connection: [Drain(**row) for row in connection.execute(query).mappings()]
        )


def _find(connection: Connection, pool: str, replica: str) -> Drain | None:
    row = connection.execute(select(tables.drains).where(*_is(pool, replica))).mappings().first()
    return None if row is None else Drain(**row)


def _is(pool: str, replica: str) -> tuple[Any, Any]:
    columns = tables.drains.c
    return columns.pool == pool, columns.replica == replica
