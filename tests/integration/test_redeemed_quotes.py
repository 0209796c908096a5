"""A quote is redeemed by one request, however many gateways ask concurrently, until it expires."""

from __future__ import annotations

import asyncio

from tenants.pricing.redeemed_quotes import RedeemedQuotes
from tenants.storage.database import open_database


def test_of_many_at_once_one_has_it_and_a_restart_changes_nothing(database_url: str) -> None:
    async def main() -> None:
        databases = [open_database(database_url) for _ in range(3)]
        claims = [
            RedeemedQuotes(database).claim("offer", f"req_{index}_{number}", 1_000)
            for index, database in enumerate(databases)
            for number in range(8)
        ]
        assert sorted(await asyncio.gather(*claims)) == [False] * 23 + [True]
        for database in databases:
            await database.close()
        database = open_database(database_url)
        assert not await RedeemedQuotes(database).claim("offer", "req_late", 1_000)
        assert await RedeemedQuotes(database).claim("another", "req_late", 1_000)
        await database.close()

    asyncio.run(main())


def test_only_its_request_gives_it_back_and_what_expired_is_forgotten(database_url: str) -> None:
    async def main() -> None:
        database = open_database(database_url)
        redeemed = RedeemedQuotes(database)
        assert await redeemed.claim("offer", "req_1", 1_000)
        await redeemed.release("offer", "req_2")
        assert not await redeemed.claim("offer", "req_2", 1_000)
        await redeemed.release("offer", "req_1")
        assert await redeemed.claim("offer", "req_2", 1_000)
        assert await redeemed.claim("later", "req_3", 1_001)
        assert [await redeemed.purge(at_us) for at_us in (999, 1_000, 1_000, 1_001)] == [0, 1, 0, 1]
        await database.close()

    asyncio.run(main())
