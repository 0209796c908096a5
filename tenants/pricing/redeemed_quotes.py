"""Redeemed quotes and the requests that redeemed them, shared by all gateways.

A row exists from the redemption until the quote's expiry, or until its request ends without a charge."""

from __future__ import annotations

from sqlalchemy import Connection, delete, select

from tenants.storage.database import Database
from tenants.storage.tables import redeemed_quotes as table
from tenants.storage.upserts import insert

MAX_PURGED = 10_000


class RedeemedQuotes:
    """Every method raises `DatabaseUnavailable`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def claim(self, offer_id: str, request_id: str, expires_us: int) -> bool:
        """Claims the offer for the request, durably; False: another request redeemed it."""

        def write(connection: Connection) -> bool:
            claimed = connection.execute(
                insert(connection, table)
                .values(offer_id=offer_id, request_id=request_id, expires_us=expires_us)
                .on_conflict_do_nothing()
                .returning(table.c.offer_id)
            )
            return claimed.first() is not None

        return await self._database.write(write)

    async def release(self, offer_id: str, request_id: str) -> None:
        """Makes the offer redeemable again; no effect where it is not this request's."""

        def write(connection: Connection) -> None:
            connection.execute(
                delete(table).where(table.c.offer_id == offer_id, table.c.request_id == request_id)
            )

        await self._database.write(write)

    async def purge(self, now_us: int) -> int:
        """Deletes at most `MAX_PURGED` expired rows; returns how many."""

        def write(connection: Connection) -> int:
            expired = select(table.c.offer_id).where(table.c.expires_us <= now_us).limit(MAX_PURGED)
            return connection.execute(delete(table).where(table.c.offer_id.in_(expired))).rowcount

        return await self._database.write(write)
