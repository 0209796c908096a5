"""Reads of engine time: sums of minutes by replica, and service beside what tenants have reserved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection

from tenants.admin.transaction import AdminActs
from tenants.counts import minute_store
from tenants.counts.minute_store import HOUR_US, KEPT_US, EngineMinute

MOST_RESERVED = 100
"""Tenants whose reservations are compared with their service: those with the largest."""


@dataclass(frozen=True, slots=True)
class EngineTime:
    """What one replica did in a time. `counts` are sums, their `state` has no meaning."""

    pool: str
    replica: str
    counts: EngineMinute


@dataclass(frozen=True, slots=True)
class ServedTime:
    """Service of a time, in cost tokens (input + 2 x output)."""

    all_tokens: int
    by_hour: Mapping[str, tuple[int, ...]]
    """Of the tenants that were asked about, in each hour with something."""


class EngineTimeReads(AdminActs):
    async def by_replica(self, from_us: int, to_us: int) -> list[EngineTime]:
        """Sums of the minutes that begin then, by pool and replica, from the gateway that saw it longest."""
        begin_us = max(from_us, to_us - KEPT_US)
        sums = await self._transactions.read(lambda one: minute_store.engine_sums(one, begin_us, to_us))
        return [EngineTime(pool, replica, counts) for pool, replica, counts in sums]

    async def served(self, from_us: int, to_us: int, tenant_ids: list[str]) -> ServedTime:
        """Service in that time: of all, and by the hour of at most `MOST_RESERVED` tenants."""
        begin_us = max(from_us, to_us - KEPT_US) // HOUR_US * HOUR_US

        def look(connection: Connection) -> ServedTime:
            total = minute_store.served_tokens(connection, begin_us, to_us)
            return ServedTime(
                total, minute_store.served_by_hour(connection, begin_us, to_us, tenant_ids[:MOST_RESERVED])
            )

        return await self._transactions.read(look)
