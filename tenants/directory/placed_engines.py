"""Engines that a placer runs, in the database: name, address and how long it answers for them.

Times are by the database's clock (SQLite: the machine's)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import delete, select

from tenants.directory import queries
from tenants.storage.database import Database
from tenants.storage.tables import placed_engines
from tenants.storage.upserts import insert


@dataclass(frozen=True, slots=True)
class PlacedEngine:
    name: str
    address: str
    left_s: float
    """Until the placer's word for it ends; negative: it has ended."""
    placed_by: str = ""
    place: str = ""


class PlacedEngines:
    def __init__(self, database: Database, wall_clock: Callable[[], float] = time.time) -> None:
        """`wall_clock` (seconds since 1970) is used with SQLite only."""
        self._database = database
        self._wall_clock = wall_clock

    async def write(self, name: str, address: str, lease_s: float, *, placed_by: str, place: str) -> None:
        """Answers for an engine for `lease_s` seconds from now. Raises `DatabaseUnavailable`."""
        await self._database.write(
            lambda connection: connection.execute(
                insert(connection, placed_engines)
                .values(
                    name=name,
                    **(
                        new := {
                            "address": address,
                            "until_us": queries.now_us(connection, self._wall_clock) + round(lease_s * 1e6),
                            "placed_by": placed_by[:128],
                            "place": place[:128],
                        }
                    ),
                )
                .on_conflict_do_update(index_elements=["name"], set_=new)
            )
        )

    async def forget(self, name: str) -> None:
        """Raises `DatabaseUnavailable`."""
        this = delete(placed_engines).where(placed_engines.c.name == name)
        await self._database.write(lambda connection: connection.execute(this))

    async def read(self) -> list[PlacedEngine]:
        """All, by name, those whose time has ended included. Raises `DatabaseUnavailable`."""
        rows, now_us = await self._database.read(
            lambda connection: (
                connection.execute(select(placed_engines).order_by(placed_engines.c.name)).mappings().all(),
                queries.now_us(connection, self._wall_clock),
            )
        )
        return [
            PlacedEngine(
                row["name"],
                row["address"],
                (row["until_us"] - now_us) / 1e6,
                row["placed_by"],
                row["place"],
            )
            for row in rows
        ]
