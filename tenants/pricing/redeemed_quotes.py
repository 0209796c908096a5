"""Which request redeemed a quote, of all gateways and through their restarts?

A row is there from the redemption until the quote would have expired anyway, or until it turns out that
nothing was charged.
"""

from __future__ import annotations

from sqlalchemy import Connection, delete, select
from sqlalchemy.dialects import postgresql, sqlite

from tenants.storage.database import Database
from tenants.storage.tables import redeemed_quotes as table

MAX_PURGED = 10_000


class RedeemedQuotes:
    """Reads and writes rows. Every method raises `DatabaseUnavailable`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def claim(self, offer_id: str, request_id: str, expires_us: int) -> bool:
        """Whether the offer is this request's from now on, durably; False: another one redeemed it."""

        def write(connection: Connection) -> bool:
            dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
            claimed = connection.execute(
                dialect.insert(table)
                .values(offer_id=offer_id, request_id=request_id, expires_us=expires_us)
                .on_conflict_do_nothing()
                .returning(table.c.offer_id)
            )
            return claimed.first() is not None

        return await self._database.write(write)

    async def release(self, offer_id: str, request_id: str) -> None:
        """Nothing was charged: the offer may be redeemed again. Nothing where it is not this request's."""

        def write(connection: Connection) -> None:
            connection.execute(
                delete(table).where(table.c.offer_id == offer_id, table.c.request_id == request_id)
            )

        await self._database.write(write)

    async def purge(self, now_us: int) -> int:
        """Forgets what has expired, at most `MAX_PURGED` rows; returns how many."""

        def write(connection: Connection) -> int:
            expired = select(table.c.offer_id).where(table.c.expires_us <= now_us).limit(MAX_PURGED)
            return connection.execute(delete(table).where(table.c.offer_id.in_(expired))).rowcount

        return await self._database.write(write)
