"""Pages of service by minute: what tenants had of each pool and were due, and what engines did."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection

from tenants.admin import validation
from tenants.admin.cursor import (
    DEFAULT_PAGE,
    Number,
    Page,
    Text,
    beyond,
    checked_limit,
    decode_cursor,
    page_of,
)
from tenants.admin.transaction import AdminActs
from tenants.counts import minute_store
from tenants.counts.minute_store import HOUR_US, MINUTE_US, EngineKey, EngineMinute, FlowKey, FlowMinute
from tenants.directory import queries
from tenants.directory.records import from_us, to_us
from tenants.errors import Invalid
from tenants.storage.tables import engine_minutes, flow_minutes
from tenants.types import Tier

WINDOWS_US = {"minute": MINUTE_US, "hour": HOUR_US}
LONGEST_US = {"minute": 24 * HOUR_US, "hour": 14 * 24 * HOUR_US}
"""The longest time that one question may cover, by window."""
MAX_NAME = 256
"""Characters of a pool's or a replica's name."""


@dataclass(frozen=True, slots=True)
class FlowRow:
    key: FlowKey
    counts: FlowMinute
    window_us: int

    def as_json(self) -> dict[str, Any]:
        return {
            "start": _iso(self.key.minute_us),
            "pool": self.key.pool,
            "tier": self.key.tier,
            "tenant_id": self.key.tenant_id,
        } | self.counts.as_json(self.window_us // 1_000_000)


@dataclass(frozen=True, slots=True)
class EngineRow:
    key: EngineKey
    counts: EngineMinute

    def as_json(self) -> dict[str, Any]:
        return {
            "start": _iso(self.key.minute_us),
            "pool": self.key.pool,
            "replica": self.key.replica,
        } | self.counts.as_json()


class FlowReads(AdminActs):
    async def page(
        self,
        *,
        since: str | None = None,
        until: str | None = None,
        window: str = "minute",
        pool: str | None = None,
        tier: str | None = None,
        tenant: str | None = None,
        cursor: str | None = None,
        limit: int = DEFAULT_PAGE,
    ) -> Page[FlowRow]:
        """Non-empty, oldest first; by default of the last hour (hours: day). Raises `Invalid`, `NotFound`."""
        if window not in WINDOWS_US:
            raise Invalid("window", f"{window[:40]!r} is not one of {', '.join(WINDOWS_US)}")
        most, window_us, table = checked_limit(limit), WINDOWS_US[window], flow_minutes
        filters = {"window": window, "pool": pool, "tier": tier, "tenant": tenant, "from": since, "to": until}
        last = (
            None
            if cursor is None
            else decode_cursor("flow", filters, cursor, tuple[Number, Text, Text, Text])
        )
        from_us, to_us_ = self._spans_of_flow(since, until, window)
        if last is not None:
            from_us = max(from_us, last[0])
        conditions: list[ColumnElement[bool]] = [table.c.minute_us >= from_us, table.c.minute_us < to_us_]
        if last is not None:
            keys = (minute_store.window_of(window_us), table.c.pool, table.c.tier, table.c.tenant_id)
            conditions.append(beyond(keys, last))
        if pool is not None:
            conditions.append(table.c.pool == _name("pool", pool))
        if tier is not None:
            conditions.append(table.c.tier == validation.choice("tier", Tier, tier).value)

        def look(connection: Connection) -> list[FlowRow]:
            wanted = list(conditions)
            if tenant is not None:
                wanted.append(table.c.tenant_id == queries.find_tenant(connection, tenant).tenant_id)
            rows = minute_store.flow_by_window(connection, window_us, wanted, most + 1)
            return [FlowRow(key, counts, window_us) for key, counts in rows]

        rows = await self._transactions.read(look)
        return page_of(rows, most, "flow", filters, lambda row: row.key)

    async def page_engines(
        self,
        *,
        since: str | None = None,
        until: str | None = None,
        pool: str | None = None,
        replica: str | None = None,
        cursor: str | None = None,
        limit: int = DEFAULT_PAGE,
    ) -> Page[EngineRow]:
        """Minutes of engines, the oldest first; without `since` the last hour. Raises `Invalid`."""
        most, table = checked_limit(limit), engine_minutes
        filters = {"pool": pool, "replica": replica, "from": since, "to": until}
        last = (
            None if cursor is None else decode_cursor("engines", filters, cursor, tuple[Number, Text, Text])
        )
        from_us, to_us_ = self._spans_of_flow(since, until, "minute")
        conditions: list[ColumnElement[bool]] = [table.c.minute_us >= from_us, table.c.minute_us < to_us_]
        if last is not None:
            conditions.append(beyond((table.c.minute_us, table.c.pool, table.c.replica), last))
        for name, value in (("pool", pool), ("replica", replica)):
            if value is not None:
                conditions.append(table.c[name] == _name(name, value))
        minutes = await self._transactions.read(
            lambda one: minute_store.engines_by_minute(one, conditions, most + 1)
        )
        rows = [EngineRow(key, counts) for key, counts in minutes]
        return page_of(rows, most, "engines", filters, lambda row: row.key)

    def _spans_of_flow(self, since: str | None, until: str | None, window: str) -> tuple[int, int]:
        """Whole windows that hold the two instants. Raises `Invalid`."""
        window_us = WINDOWS_US[window]
        now_us = self._transactions.now_us()
        end_us = now_us if until is None else to_us(validation.instant("to", until))
        default_us = end_us - (HOUR_US if window == "minute" else 24 * HOUR_US)
        begin_us = default_us if since is None else to_us(validation.instant("from", since))
        if begin_us >= end_us:
            raise Invalid("from", "must lie before to: as it is, no minute can match")
        if end_us - begin_us > LONGEST_US[window]:
            hours = LONGEST_US[window] // HOUR_US
            way_out = " or ask for windows of an hour" if window == "minute" else ""
            raise Invalid(
                "from",
                f"must lie at most {hours} hours before to with windows of a {window}: ask in parts{way_out}",
            )
        return begin_us // window_us * window_us, -(-end_us // window_us) * window_us


def _name(field: str, value: str) -> str:
    # PostgreSQL takes no NUL.
    if not value or len(value) > MAX_NAME or not value.isprintable():
        raise Invalid(field, f"needs 1 to {MAX_NAME} printable characters; leave it out for any")
    return value


def _iso(at_us: int) -> str:
    at: datetime = from_us(at_us)
    return at.isoformat()
