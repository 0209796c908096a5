"""Storage of SLO targets, counts and misses.

Counts by spans of five minutes (for burn rates) and of a day (for error budgets), incremented by every
gateway; misses one by one. Purged after a while; no account depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select
from sqlalchemy.dialects import postgresql, sqlite

from tenants.slo.slo import DAY_S, KEPT_SPANS_S, PERIOD_DAYS, SPAN_S, Missed, Slo, SloTally
from tenants.storage.database import Database
from tenants.storage.tables import slo_counts, slo_misses, slos
from tenants.types import Tier

MAX_MISSES = 1_000_000
MAX_PURGED = 20_000


@dataclass(frozen=True, slots=True)
class CountKey:
    """Key of a count."""

    tenant_id: str
    tier: str
    metric: str


async def read_slos(database: Database) -> list[Slo]:
    """Reads all targets. Raises `DatabaseUnavailable`."""
    return await database.read(lambda connection: slos_where(connection))


def slos_where(connection: Connection, *conditions: Any) -> list[Slo]:
    """Targets ordered by tenant, tier and metric."""
    query = select(slos).where(*conditions).order_by(slos.c.tenant_id, slos.c.tier, slos.c.metric)
    return [
        Slo(
            row["id"],
            row["tenant_id"],
            Tier(row["tier"]),
            row["metric"],
            row["target_us"],
            row["per_mille"],
        )
        for row in connection.execute(query).mappings()
    ]


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
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
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
        # The same order in every gateway, so that two of them never deadlock.
        for key in sorted(tallies, key=lambda each: (each.tenant_id, each.tier, each.metric))
        for span_s in (SPAN_S, DAY_S)
    ]
    if rows:
        new = dialect.insert(slo_counts)
        connection.execute(
            new.on_conflict_do_update(
                index_elements=["tenant_id", "tier", "metric", "span_s", "start_s"],
                set_={
                    "total": slo_counts.c.total + new.excluded.total,
                    "missed": slo_counts.c.missed + new.excluded.missed,
                },
            ),
            rows,
        )
    if missed:
        connection.execute(
            dialect.insert(slo_misses).on_conflict_do_nothing(),
            [
                {
                    "request_id": each.request_id,
                    "metric": each.metric,
                    "tenant_id": each.tenant_id,
                    "tier": each.tier,
                    "cause": each.cause,
                    "target_us": each.target_us,
                    "actual_us": each.actual_us,
                    "at_us": each.at_us,
                    "evidence": dict(each.evidence),
                }
                for each in missed
            ],
        )


async def purge(database: Database, now_s: float, most_misses: int = MAX_MISSES) -> None:
    """Deletes counts and misses older than any report covers. Raises `DatabaseUnavailable`."""

    def work(connection: Connection) -> None:
        for span_s, kept_s in ((SPAN_S, KEPT_SPANS_S), (DAY_S, (PERIOD_DAYS + 1) * DAY_S)):
            connection.execute(
                delete(slo_counts).where(
                    slo_counts.c.span_s == span_s, slo_counts.c.start_s < int(now_s) - kept_s
                )
            )
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
    """Tallies by key and start of the span."""
    table = slo_counts
    query = select(table).where(table.c.span_s == span_s, table.c.start_s >= since_s)
    if tenant_id is not None:
        query = query.where(table.c.tenant_id == tenant_id)
    found: dict[CountKey, dict[int, SloTally]] = {}
    for row in connection.execute(query).mappings():
        key = CountKey(row["tenant_id"], row["tier"], row["metric"])
        found.setdefault(key, {})[row["start_s"]] = SloTally(row["total"], row["missed"])
    return found


def causes(connection: Connection, since_us: int, tenant_id: str | None) -> dict[CountKey, dict[str, int]]:
    """Misses by cause, the most common first."""
    table = slo_misses
    groups = (table.c.tenant_id, table.c.tier, table.c.metric, table.c.cause)
    query = select(*groups, func.count().label("missed")).where(table.c.at_us >= since_us).group_by(*groups)
    if tenant_id is not None:
        query = query.where(table.c.tenant_id == tenant_id)
    found: dict[CountKey, dict[str, int]] = {}
    for row in sorted(
        connection.execute(query).mappings(), key=lambda each: (-each["missed"], each["cause"])
    ):
        key = CountKey(row["tenant_id"], row["tier"], row["metric"])
        found.setdefault(key, {})[row["cause"]] = row["missed"]
    return found


def misses(connection: Connection, conditions: Sequence[Any], most: int) -> list[Missed]:
    """Misses, newest first."""
    query = select(slo_misses).where(*conditions)
    query = query.order_by(slo_misses.c.at_us.desc(), slo_misses.c.request_id, slo_misses.c.metric)
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


def insert_slo(connection: Connection, slo: Slo, now_us: int) -> None:
    """Inserts a target."""
    connection.execute(
        insert(slos).values(
            id=slo.slo_id,
            tenant_id=slo.tenant_id,
            tier=slo.tier.value,
            metric=slo.metric,
            target_us=slo.target_us,
            per_mille=slo.per_mille,
            created_us=now_us,
        )
    )
