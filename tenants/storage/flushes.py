"""Flushes that add to counts exactly once, however often repeated.

After a lost connection it is unknown whether a transaction was committed. So a writer numbers its flushes,
repeats one unchanged until it is answered, and the number is stored in the same transaction."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, delete

from tenants.storage.tables import flushes
from tenants.storage.upserts import insert

KEPT_US = 7 * 86_400 * 1_000_000
"""Writers idle for longer are forgotten; none repeats a flush for so long."""


@dataclass(frozen=True, slots=True)
class Flush:
    writer: str
    """Unique to its process."""
    number: int
    """1, 2, 3, …"""


def is_new(connection: Connection, flush: Flush, now_us: int) -> bool:
    """Whether this flush was not added before; records it."""
    new = insert(connection, flushes).values(writer=flush.writer, number=flush.number, at_us=now_us)
    noted = connection.execute(
        new.on_conflict_do_update(
            index_elements=["writer"],
            set_={"number": new.excluded.number, "at_us": new.excluded.at_us},
            where=flushes.c.number < new.excluded.number,
        ).returning(flushes.c.number)
    )
    return noted.first() is not None


def purge(connection: Connection, now_us: int) -> None:
    connection.execute(delete(flushes).where(flushes.c.at_us < now_us - KEPT_US))
