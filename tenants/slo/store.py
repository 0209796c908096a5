"""Storage of SLO targets, counts and misses.

Counts by spans of five minutes (for burn rates) and of a day (for error budgets), incremented by every
gateway; misses one by one. Purged by age; no account depends on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, Connection, case, cast, delete, func, select

from tenants.slo.slo import (
    DAY_S,
    KEPT_SPANS_S,
    PERIOD_DAYS,
    SPAN_S,
    WINDOWS_S,
    Missed,
    SloTally,
    window_since_s,
)
from tenants.slo.target import Slo, of_row
from tenants.storage.database import Database
from tenants.storage.tables import slo_causes, slo_counts, slo_misses, slos
from tenants.storage.upserts import add_counts, insert

MAX_MISSES = 1_000_000
MAX_PURGED = 20_000
MISS_ORDER = (slo_misses.c.at_us, slo_misses.c.request_id, slo_misses.c.metric)
"""The newest first, so all of them descending."""


@dataclass(frozen=True, slots=True)
class CountKey:
    tenant_id: str
    tier: str
    metric: str


async def read_slos(database: Database) -> list[Slo]:
    """Raises `DatabaseUnavailable`."""
    return await database.read(lambda connection: slos_where(connection))


def slos_where(connection: Connection, *conditions: Any, most: int | None = None) -> list[Slo]:
    """Targets by tenant, tier and metric, at most `most`."""
    in_order = (slos.c.tenant_id, slos.c.tier, slos.c.metric)
    query = select(slos).where(*conditions).order_by(*in_order).limit(most)
    return [of_row(dict(row)) for row in connection.execute(query).mappings()]


def binding(connection: Connection, tenant_id: str) -> list[Slo]:
    """The targets that bind one tenant: its own, and the default ones where it has none."""
    rows = slos_where(connection, slos.c.tenant_id.in_(["", tenant_id]))
    own = {(slo.tier, slo.metric) for slo in rows if slo.tenant_id}
    return [slo for slo in rows if slo.tenant_id or (slo.tier, slo.metric) not in own]


async def add(
    database: Database, tallies: Mapping[CountKey, SloTally], missed: Sequence[Missed], now_s: float
) -> None:
    """Adds to the counts of `now_s` (seconds since 1970) and inserts misses; existing ones stay. Raises
    `DatabaseUnavailable`; whether the counts were added is then unknown, so a repeat may count twice."""
    if tallies or missed:
        await database.write(lambda connection: _add(connection, tallies, missed, now_s))


def _add(
    connection: Connection, tallies: Mapping[CountKey, SloTally], missed: Sequence[Missed], now_s: float
) -> None:
    rows = [
        {
            "tenant_id": key.tenant_id,
            "tier": key.tier,
            "metric": key.metric,
            "span_s": span_s,
            "start_s": int(now_s) // span_s * span_s,
            "total": tallies[key].total,
            "missed": tallies[key].missed,
        }
        for key in tallies
        for span_s in (SPAN_S, DAY_S)
    ]
    add_counts(connection, slo_counts, rows)
    if missed:
        _add_misses(connection, missed)


def _add_misses(connection: Connection, missed: Sequence[Missed]) -> None:
    """Inserts misses, and counts those that were not there by cause and day."""
    columns = slo_misses.c
    inserted = connection.execute(
        insert(connection, slo_misses)
        .on_conflict_do_nothing()
        .returning(columns.tenant_id, columns.tier, columns.metric, columns.cause, columns.at_us),
        [
            {
                "request_id": miss.request_id,
                "metric": miss.metric,
                "tenant_id": miss.tenant_id,
                "tier": miss.tier,
                "cause": miss.cause,
                "target_us": miss.target_us,
                "actual_us": miss.actual_us,
                "at_us": miss.at_us,
                "evidence": dict(miss.evidence),
            }
            for miss in missed
        ],
    )
    by_cause = Counter(
        (row.tenant_id, row.tier, row.metric, row.cause, row.at_us // 1_000_000 // DAY_S * DAY_S)
        for row in inserted
    )
    names = ("tenant_id", "tier", "metric", "cause", "start_s")
    rows = [dict(zip(names, key, strict=True)) | {"missed": count} for key, count in by_cause.items()]
    add_counts(connection, slo_causes, rows)


async def purge(database: Database, now_s: float, most_misses: int = MAX_MISSES) -> None:
    """Deletes counts and misses older than any report covers. Raises `DatabaseUnavailable`."""

    def work(connection: Connection) -> None:
        for span_s, kept_s in ((SPAN_S, KEPT_SPANS_S), (DAY_S, (PERIOD_DAYS + 1) * DAY_S)):
            connection.execute(
                delete(slo_counts).where(
                    slo_counts.c.span_s == span_s, slo_counts.c.start_s < int(now_s) - kept_s
                )
            )
        oldest_s = int(now_s) - (PERIOD_DAYS + 1) * DAY_S
        connection.execute(delete(slo_causes).where(slo_causes.c.start_s < oldest_s))
        cutoff_us = (int(now_s) - (PERIOD_DAYS + 1) * DAY_S) * 1_000_000
        too_many = connection.execute(
            select(slo_misses.c.at_us).order_by(slo_misses.c.at_us.desc()).offset(most_misses).limit(1)
        ).scalar()
        if too_many is not None:
            cutoff_us = max(cutoff_us, too_many + 1)
        connection.execute(delete(slo_misses).where(slo_misses.c.at_us < cutoff_us))

    await database.write(work)


def counts(
    connection: Connection, span_s: int, since_s: int, tenant_id: str | None
) -> dict[CountKey, dict[int, SloTally]]:
    table = slo_counts
    query = select(table).where(table.c.span_s == span_s, table.c.start_s >= since_s)
    if tenant_id is not None:
        query = query.where(table.c.tenant_id == tenant_id)
    tallies: dict[CountKey, dict[int, SloTally]] = {}
    for row in connection.execute(query).mappings():
        key = CountKey(row["tenant_id"], row["tier"], row["metric"])
        tallies.setdefault(key, {})[row["start_s"]] = SloTally(row["total"], row["missed"])
    return tallies


def windows(connection: Connection, now_s: float) -> dict[CountKey, dict[int, SloTally]]:
    """Tallies of each alert window by key, of keys with a miss in the longest one; summed by the database."""
    table = slo_counts
    since_s = {window_s: window_since_s(window_s, now_s) for window_s in WINDOWS_S}
    sums = [
        cast(func.sum(case((table.c.start_s >= begin_s, table.c[name]), else_=0)), BigInteger)
        for begin_s in since_s.values()
        for name in ("total", "missed")
    ]
    groups = (table.c.tenant_id, table.c.tier, table.c.metric)
    query = select(*groups, *sums).where(table.c.span_s == SPAN_S, table.c.start_s >= min(since_s.values()))
    query = query.group_by(*groups).having(func.sum(table.c.missed) > 0)
    return {
        CountKey(tenant_id, tier, metric): {
            window_s: SloTally(numbers[2 * at], numbers[2 * at + 1]) for at, window_s in enumerate(since_s)
        }
        for tenant_id, tier, metric, *numbers in connection.execute(query)
    }


def causes(connection: Connection, since_s: int, tenant_id: str | None) -> dict[CountKey, dict[str, int]]:
    """By key, of the days that begin at `since_s` or later, the most common first."""
    table = slo_causes
    groups = (table.c.tenant_id, table.c.tier, table.c.metric, table.c.cause)
    missed = cast(func.sum(table.c.missed), BigInteger).label("missed")
    query = select(*groups, missed).where(table.c.start_s >= since_s).group_by(*groups)
    if tenant_id is not None:
        query = query.where(table.c.tenant_id == tenant_id)
    by_key: dict[CountKey, dict[str, int]] = {}
    for row in sorted(connection.execute(query).mappings(), key=lambda row: (-row["missed"], row["cause"])):
        key = CountKey(row["tenant_id"], row["tier"], row["metric"])
        by_key.setdefault(key, {})[row["cause"]] = row["missed"]
    return by_key


def causes_by_day(
    connection: Connection, since_s: int, tenant_id: str | None, tier: str | None
) -> dict[int, dict[str, int]]:
    """By day that begins at `since_s` or later, the oldest first."""
    table = slo_causes
    missed = cast(func.sum(table.c.missed), BigInteger).label("missed")
    query = select(table.c.start_s, table.c.cause, missed).where(table.c.start_s >= since_s)
    for column, value in ((table.c.tenant_id, tenant_id), (table.c.tier, tier)):
        if value is not None:
            query = query.where(column == value)
    groups = (table.c.start_s, table.c.cause)
    by_day: dict[int, dict[str, int]] = {}
    for row in connection.execute(query.group_by(*groups).order_by(*groups)):
        by_day.setdefault(row.start_s, {})[row.cause] = row.missed
    return by_day


def misses(connection: Connection, conditions: Sequence[Any], most: int) -> list[Missed]:
    query = select(slo_misses).where(*conditions)
    query = query.order_by(*(column.desc() for column in MISS_ORDER))
    return [
        Missed(
            row["request_id"],
            row["tenant_id"],
            row["tier"],
            row["metric"],
            row["cause"],
            row["target_us"],
            row["actual_us"],
            row["at_us"],
            row["evidence"],
        )
        for row in connection.execute(query.limit(most)).mappings()
    ]
