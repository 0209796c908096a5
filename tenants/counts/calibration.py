"""Calibration of forecasts: how often the figures stated on arrival were kept.

Counted by hour, model, tier, figure, stated wait and kind of promise; each flush counts exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, select

from tenants.storage import flushes
from tenants.storage.database import Database
from tenants.storage.flushes import Flush
from tenants.storage.tables import calibration_counts
from tenants.storage.upserts import add_counts

HOUR_S = 3600
KEPT_S = 90 * 24 * HOUR_S
MAX_PURGED_HOURS = 24
FIGURES = ("wait", "ttft", "e2e", "output")
KINDS = ("plain", "binding")


class CalibrationKey(NamedTuple):
    """What stated figures are counted by."""

    hour_s: int
    """Seconds since 1970."""
    model: str
    tier: str
    figure: str
    """One of `FIGURES`."""
    wait_bucket: int
    """By the stated wait."""
    kind: str
    """One of `KINDS`; binding: it was a redeemed quote."""


class KeptCount(NamedTuple):
    """How many requests got a figure, and how many stayed within it."""

    requests: int
    within_p50: int
    within_p90: int

    def plus(self, other: KeptCount) -> KeptCount:
        return KeptCount(
            self.requests + other.requests,
            self.within_p50 + other.within_p50,
            self.within_p90 + other.within_p90,
        )


async def add(
    database: Database, counts: Mapping[CalibrationKey, KeptCount], flush: Flush, now_s: float
) -> None:
    """Adds the counts, unless this flush was added before. Raises `DatabaseUnavailable`."""

    def work(connection: Connection) -> None:
        if flushes.is_new(connection, flush, round(now_s * 1e6)):
            rows = [key._asdict() | count._asdict() for key, count in counts.items()]
            add_counts(connection, calibration_counts, rows)

    await database.write(work)


async def purge(database: Database, now_s: float) -> int:
    """At most `MAX_PURGED_HOURS` hours beyond `KEPT_S`; returns the rows. Raises `DatabaseUnavailable`."""
    hour_s: Any = calibration_counts.c.hour_s

    def work(connection: Connection) -> int:
        old = select(hour_s).where(hour_s < int(now_s) - KEPT_S).distinct().order_by(hour_s)
        hours = connection.execute(old.limit(MAX_PURGED_HOURS)).scalars().all()
        if not hours:
            return 0
        return connection.execute(delete(calibration_counts).where(hour_s <= hours[-1])).rowcount

    return await database.write(work)
