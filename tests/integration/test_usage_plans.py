"""Questions about usage read sums, not the ledger: plans, and how many rows are visited."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import func, select

from tenants.storage.database import Database
from tenants.storage.tables import ledger, usage_sums
from tenants.usage.fold import is_behind
from tenants.usage.query import UsageQuery, edges, grain_for
from tenants.usage.read import usage
from tenants.usage.verify import usage_problems
from tests.support import query_plans
from tests.support.usage import MONDAY_US, answered, as_mapping, by_ledger, fold_all, traffic, write

DAY_US = 86_400_000_000
MONTH = UsageQuery(MONDAY_US, MONDAY_US + 30 * DAY_US)
QUESTIONS = [
    MONTH,
    replace(MONTH, group_by=("tenant", "tier", "model")),
    replace(MONTH, group_by=("tenant",), window="day"),
    replace(MONTH, group_by=("tenant",), window="day", tenant_id="ten_1"),
    replace(MONTH, group_by=("project", "key"), tenant_id="ten_1"),
    replace(MONTH, group_by=("label:team",), tenant_id="ten_1"),
    replace(MONTH, key_id="key_1_1", tenant_id="ten_1", window="month"),
]

FROM_LEDGER = [
    replace(MONTH, to_us=MONTH.from_us + DAY_US, group_by=("key",), window="hour", tenant_id="ten_1")
]
"""Read from an index of the ledger, a bounded number of rows."""


async def _filled(database: Database, requests: int, tenants: int, keys: int) -> int:
    """Traffic of 30 days, folded but for the last requests; how many rows the ledger has.

    PostgreSQL keeps no statistics of the ledger here: a plan must not need them.
    """
    if database.dialect == "postgresql":
        await database.write(
            lambda connection: connection.exec_driver_sql("ALTER TABLE ledger SET (autovacuum_enabled = off)")
        )
    rows = traffic(requests, tenants=tenants, keys=keys, models=1, days=30, labels=False)
    await write(database, rows[:-20])
    await fold_all(database, most=5_000)
    await write(database, rows[-20:])
    assert await database.read(is_behind)
    return len(rows)


async def _check(database: Database, rows: int) -> None:
    with query_plans.recorder() as recorder:
        for query in QUESTIONS + FROM_LEDGER:
            recorder.start()
            found = await answered(database, query, most=1_000)
            statements = [each for each in recorder.stop() if each.is_read]
            assert found.rows
            for statement in statements:
                scans = await database.read(
                    lambda connection, one=statement: query_plans.whole_scans(connection, one)
                )
                assert scans == [], query
            if query in FROM_LEDGER:
                continue
            visited = await database.read(
                lambda connection, some=statements, query=query: _visited(connection, some, query)
            )
            assert 0 < visited <= rows / 100, (query, visited)


def _visited(connection: object, statements: list[query_plans.Statement], query: UsageQuery) -> int:
    """Rows read: PostgreSQL counts them; on SQLite those in the ranges that its plan searches."""
    if connection.dialect.name == "postgresql":  # type: ignore[attr-defined]
        total = 0
        for statement in statements:
            plan = query_plans.plan_of(connection, statement, analyze=True)  # type: ignore[arg-type]
            for node, _ in query_plans.nodes(plan):
                if node.get("Relation Name") in ("ledger", "usage_sums", "usage_labels"):
                    lost = node.get("Rows Removed by Filter", 0) + node.get(
                        "Rows Removed by Index Recheck", 0
                    )
                    total += round((node["Actual Rows"] + lost) * node["Actual Loops"])
        return total
    grain = grain_for(query, edges(query), 0)
    assert grain is not None
    conditions = [
        usage_sums.c.grain == grain.value,
        usage_sums.c.start_us >= query.from_us,
        usage_sums.c.start_us < query.to_us,
    ]
    if query.tenant_id is not None:
        conditions.append(usage_sums.c.tenant_id == query.tenant_id)
    of_sums = select(func.count()).select_from(usage_sums).where(*conditions)
    plans = [
        str(row[3])
        for statement in statements
        for row in connection.exec_driver_sql(  # type: ignore[attr-defined]
            f"EXPLAIN QUERY PLAN {statement.text}", statement.parameters
        )
    ]
    assert any("SEARCH usage_sums USING" in each for each in plans), plans
    return int(connection.execute(of_sums).scalar_one()) + 40  # type: ignore[attr-defined]


async def test_a_month_of_usage_visits_a_hundredth_of_the_ledger(database: Database) -> None:
    rows = await _filled(database, 20_000, tenants=3, keys=2)
    await _check(database, rows)
    query = replace(MONTH, group_by=("tenant", "outcome"), window="day")
    assert as_mapping(await answered(database, query)) == await by_ledger(database, query)


@pytest.mark.long
@pytest.mark.timeout(1_800)
async def test_a_month_of_usage_of_a_million_requests(database: Database) -> None:
    rows = await _filled(database, 1_000_000, tenants=100, keys=100)
    await _check(database, rows)
    assert await usage_problems(database) == []
    assert rows < await database.read(
        lambda connection: connection.execute(select(func.max(ledger.c.id))).scalar_one() + 1
    )
    found = await database.read(lambda connection: usage(connection, MONTH, None, 10))
    assert len(found.rows) == 1
