"""Gateway heartbeats in the database.

Requests of a gateway that has been silent for too long are settled by another. Ages are measured on the
database's clock, so that gateways' clocks need not agree (SQLite: the machine's, which all its users share).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection, delete, exists, select, text, update
from sqlalchemy.dialects import postgresql, sqlite

from tenants.errors import Invalid
from tenants.storage.database import Database
from tenants.storage.tables import gateways

MAX_GATEWAY_ID = 80
MAX_ADDRESS = 256
MAX_ENGINES = 256


@dataclass(frozen=True, slots=True)
class GatewaySeen:
    """A gateway as recorded in the database."""

    gateway_id: str
    address: str
    """For display."""
    engines: frozenset[str]
    """Names of the engines that it can send requests to."""
    silent_s: float
    """Since its last heartbeat."""


class GatewayRegistry:
    """Reads and writes heartbeats."""

    def __init__(self, database: Database, wall_clock: Callable[[], float] = time.time) -> None:
        """`wall_clock` (seconds since 1970) is used with SQLite only."""
        self._database = database
        self._wall_clock = wall_clock

    async def beat(self, gateway_id: str, address: str, engines: frozenset[str]) -> list[GatewaySeen]:
        """Writes a heartbeat; returns every gateway, this one included. Raises `DatabaseUnavailable`, and
        `Invalid` for a name that cannot be stored."""
        if not 0 < len(gateway_id) <= MAX_GATEWAY_ID:
            raise Invalid("gateway_id", f"must have 1 to {MAX_GATEWAY_ID} characters")
        if len(engines) > MAX_ENGINES:
            raise Invalid("engines", f"more than {MAX_ENGINES} engines")

        def write(connection: Connection) -> list[GatewaySeen]:
            now_us = self._now_us(connection)
            dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
            new = {
                "heartbeat_us": now_us,
                "address": address[:MAX_ADDRESS],
                "engines": sorted(engines),
                "adopter": "",
            }
            connection.execute(
                dialect.insert(gateways)
                .values(id=gateway_id, started_us=now_us, **new)
                .on_conflict_do_update(index_elements=["id"], set_=new)
            )
            return _seen(connection, now_us)

        return await self._database.write(write)

    async def seen(self) -> list[GatewaySeen]:
        """Every gateway."""
        return await self._database.read(lambda connection: _seen(connection, self._now_us(connection)))

    async def claim(self, gateway_id: str, adopter: str, stale_s: float) -> bool:
        """Claims the right to settle the requests of a gateway that is silent for longer than `stale_s`.
        False when it is not, or when another live gateway has that right."""

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

    async def forget(self, gateway_id: str, silent_s: float = 0.0) -> None:
        """Removes a gateway that has stopped, or has been silent for `silent_s`, once all its requests are
        settled."""

        def write(connection: Connection) -> None:
            latest_us = self._now_us(connection) - round(silent_s * 1e6)
            connection.execute(
                delete(gateways).where(gateways.c.id == gateway_id, gateways.c.heartbeat_us <= latest_us)
            )

        await self._database.write(write)

    def _now_us(self, connection: Connection) -> int:
        if connection.dialect.name == "postgresql":
            query = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
            return int(connection.execute(text(query)).scalar_one())
        return round(self._wall_clock() * 1e6)


def _seen(connection: Connection, now_us: int) -> list[GatewaySeen]:
    rows = connection.execute(select(gateways).order_by(gateways.c.id)).mappings()
    return [
        GatewaySeen(
            row["id"],
            row["address"],
            frozenset(row["engines"]),
            max(0.0, (now_us - row["heartbeat_us"]) / 1e6),
        )
        for row in rows
    ]
