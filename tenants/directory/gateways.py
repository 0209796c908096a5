"""Gateway heartbeats in the database.

Another gateway settles the requests of one silent for too long, by the database's clock (SQLite: the
machine's). A row names its process (`Instance`), so that two processes never write one in turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection, delete, exists, select, update

from tenants.directory import queries
from tenants.errors import Invalid, TenancyError
from tenants.storage.database import Database
from tenants.storage.release import MAX_RELEASE_CHARS, this_release
from tenants.storage.tables import gateways, progress
from tenants.storage.upserts import insert

MAX_GATEWAY_ID = 80
MAX_ADDRESS = 256
MAX_ENGINES = 256
CONFIRM_S = 5.0
"""How long an admin act waits for the gateways to serve by it."""
CONFIRM_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Instance:
    instance_id: str = ""
    """Random; empty: not known."""
    runs_in: str = ""
    """Boot of the machine, device and inode of the data directory, whose lock it holds; empty: not known."""

    def follows(self, seen: GatewaySeen) -> bool:
        """Whether the row's process has ended, or is this one: no two processes lock one directory."""
        return self.instance_id == seen.instance_id or self.runs_in == seen.runs_in != ""


@dataclass(frozen=True, slots=True)
class GatewaySeen:
    gateway_id: str
    address: str
    engines: frozenset[str]
    """Names of the engines that it can send requests to."""
    silent_s: float
    """Since its last heartbeat."""
    instance_id: str = ""
    runs_in: str = ""
    heartbeat_us: int = 0
    """Of the database's clock."""
    served_revision: int | None = None
    """The directory's revision that it serves by; None: not said yet."""
    release: str = ""
    """Fairgate's version that it runs; empty: one that did not say it."""


class IdentityTaken(TenancyError):
    """Another process serves under this gateway's id. The message names the way out."""

    def __init__(self, taken_by: GatewaySeen) -> None:
        where = f" at {taken_by.address}" if taken_by.address else ""
        super().__init__(
            f"another process{where} serves as gateway {taken_by.gateway_id}, by a copy of the same data"
            " directory: stop one of the two, or delete the file gateway-id in the data directory of one,"
            " which then starts as a gateway of its own"
        )
        self.taken_by = taken_by


class GatewayRegistry:
    def __init__(self, database: Database, wall_clock: Callable[[], float] = time.time) -> None:
        """`wall_clock` (seconds since 1970) is used with SQLite only."""
        self._database = database
        self._wall_clock = wall_clock
        self._release = this_release()[:MAX_RELEASE_CHARS]

    async def beat(
        self,
        gateway_id: str,
        address: str,
        engines: frozenset[str],
        instance: Instance = Instance(),
        *,
        takes_over: bool = True,
    ) -> list[GatewaySeen]:
        """Writes a heartbeat; returns every gateway, this one included. Raises `DatabaseUnavailable`,
        `Invalid` for a name that cannot be stored and, unless it `takes_over`, `IdentityTaken`."""
        if not 0 < len(gateway_id) <= MAX_GATEWAY_ID:
            raise Invalid("gateway_id", f"must have 1 to {MAX_GATEWAY_ID} characters")
        if len(engines) > MAX_ENGINES:
            raise Invalid("engines", f"more than {MAX_ENGINES} engines")

        def write(connection: Connection) -> list[GatewaySeen]:
            now_us = self._now_us(connection)
            new = {
                "heartbeat_us": now_us,
                "address": address[:MAX_ADDRESS],
                "engines": sorted(engines),
                "adopter": "",
                "instance_id": instance.instance_id,
                "runs_in": instance.runs_in,
                "release": self._release,
            }
            is_ours = None if takes_over else gateways.c.instance_id.in_(["", instance.instance_id])
            written = connection.execute(
                insert(connection, gateways)
                .values(id=gateway_id, started_us=now_us, **new)
                .on_conflict_do_update(index_elements=["id"], set_=new, where=is_ours)
                .returning(gateways.c.id)
            ).first()
            seen = _seen(connection, now_us)
            if written is None:
                raise IdentityTaken(next(row for row in seen if row.gateway_id == gateway_id))
            return seen

        return await self._database.write(write)

    async def find(self, gateway_id: str) -> GatewaySeen | None:
        """None: it has stopped in order, or never began."""
        return next((row for row in await self.seen() if row.gateway_id == gateway_id), None)

    async def is_held_by(self, gateway_id: str, instance: Instance) -> bool:
        """Whether no other process has begun to serve under this id."""
        row = await self.find(gateway_id)
        return row is None or row.instance_id in ("", instance.instance_id)

    async def serve(self, gateway_id: str, revision: int) -> None:
        """Records the directory's revision that a gateway serves."""
        this = update(gateways).where(gateways.c.id == gateway_id)
        await self._database.write(
            lambda connection: connection.execute(this.values(served_revision=revision))
        )

    async def not_serving(self, stale_s: float, wait_s: float = CONFIRM_S) -> list[GatewaySeen]:
        """Waits up to `wait_s` until every gateway serves the directory's revision; returns those that do
        not. One that has been silent for longer than `stale_s` is taken for dead."""
        until_s = time.monotonic() + wait_s
        revision: int | None = None
        while True:
            now, seen = await self._database.read(
                lambda connection: (queries.revision(connection), _seen(connection, self._now_us(connection)))
            )
            revision = now if revision is None else revision
            late = [
                row
                for row in seen
                if row.silent_s <= stale_s and (row.served_revision is None or row.served_revision < revision)
            ]
            if not late or time.monotonic() >= until_s:
                return late
            await asyncio.sleep(CONFIRM_EVERY_S)

    async def seen(self) -> list[GatewaySeen]:
        return await self._database.read(lambda connection: _seen(connection, self._now_us(connection)))

    async def claim(self, gateway_id: str, adopter: str, stale_s: float) -> bool:
        """Claims a gateway's requests. False: not silent for `stale_s`, or another live gateway has them."""

        def write(connection: Connection) -> bool:
            latest_us = self._now_us(connection) - round(stale_s * 1e6)
            other = gateways.alias("other")
            has_adopter = exists().where(
                other.c.id == gateways.c.adopter, other.c.id != adopter, other.c.heartbeat_us > latest_us
            )
            claimed = connection.execute(
                update(gateways)
                .where(gateways.c.id == gateway_id, gateways.c.heartbeat_us <= latest_us, ~has_adopter)
                .values(adopter=adopter)
            )
            return claimed.rowcount == 1

        return await self._database.write(write)

    async def forget(self, gateway_id: str, silent_s: float = 0.0, instance: Instance | None = None) -> None:
        """Removes a gateway that has stopped, or has been silent for `silent_s`, once all its requests are
        settled, with its progress record. With `instance` only the row of that process."""

        def write(connection: Connection) -> None:
            latest_us = self._now_us(connection) - round(silent_s * 1e6)
            mine = [] if instance is None else [gateways.c.instance_id == instance.instance_id]
            gone = connection.execute(
                delete(gateways).where(
                    gateways.c.id == gateway_id, gateways.c.heartbeat_us <= latest_us, *mine
                )
            )
            if gone.rowcount:
                connection.execute(delete(progress).where(progress.c.gateway_id == gateway_id))

        await self._database.write(write)

    def _now_us(self, connection: Connection) -> int:
        return queries.now_us(connection, self._wall_clock)


def end_all(connection: Connection) -> None:
    """Of a restored database: none of its gateways lives, nor do engines that it alone reached. What they
    left open is settled by the first one that starts."""
    ended = {"heartbeat_us": 0, "engines": [], "adopter": "", "instance_id": "", "runs_in": ""}
    connection.execute(update(gateways).values(ended))


def _seen(connection: Connection, now_us: int) -> list[GatewaySeen]:
    rows = connection.execute(select(gateways).order_by(gateways.c.id)).mappings()
    return [
        GatewaySeen(
            row["id"],
            row["address"],
            frozenset(row["engines"]),
            max(0.0, (now_us - row["heartbeat_us"]) / 1e6),
            row["instance_id"],
            row["runs_in"],
            row["heartbeat_us"],
            row["served_revision"],
            row["release"],
        )
        for row in rows
    ]
