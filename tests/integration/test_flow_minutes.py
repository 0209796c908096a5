"""Service by minute in both databases: added up, in pages, purged; a load told to others through Redis."""

from __future__ import annotations

import itertools
import math
from functools import partial
from types import SimpleNamespace

import pytest
import redis.asyncio as redis_client
from prometheus_client import CollectorRegistry
from sqlalchemy import func, select, text

from engine.entry import QueueEntry
from gateway.dispatch.load_feed import LoadFeed
from gateway.explain.ideal_share import FairTerms
from gateway.explain.load_log import LoadLog
from gateway.explain.minutes.engine_meter import EngineMeter
from gateway.explain.minutes.flow_meter import FlowMeter
from gateway.explain.minutes.writer import MinuteWriter
from gateway.explain.pool_load import PoolLoadShare
from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.counts import minute_store
from tenants.counts.minute_store import (
    HOUR_US,
    KEPT_US,
    MINUTE_US,
    EngineKey,
    EngineMinute,
    FlowKey,
    FlowMinute,
    MinutesCounted,
)
from tenants.errors import DatabaseUnavailable, Invalid
from tenants.nouns.tenant import TenantCreate
from tenants.resources.reading import read_page
from tenants.resources.records.minutes import ENGINES, FLOW, EngineQuery, FlowQuery
from tenants.storage.database import Database
from tenants.storage.flushes import Flush
from tenants.storage.tables import engine_minutes, flow_minutes
from tests.support.builders import site

NOW_S = 1_700_000_040.0
MINUTE = int(NOW_S) * 1_000_000
"""A whole one."""


@pytest.fixture
def admin(database: Database, pepper: bytes) -> Admin:
    return Admin(Transactions(database, pepper, clock=lambda: NOW_S))


def _counted(minutes: int, tenants: int, served: int = 10) -> MinutesCounted:
    return MinutesCounted(
        {
            FlowKey(MINUTE - number * MINUTE_US, "pool", "standard", f"ten_{tenant}"): FlowMinute(
                served, served + tenant, 600, 2, 1_000_000
            )
            for number in range(1, minutes + 1)
            for tenant in range(tenants)
        },
        {
            EngineKey(MINUTE - number * MINUTE_US, "pool", "engine-0"): EngineMinute(
                "up", 60_000_000, 60_000_000, 0, 100, 50_000_000, 800, 10, 20, 0, 0, 30_000
            )
            for number in range(1, minutes + 1)
        },
    )


NUMBERS = itertools.count(1)


async def _add(database: Database, gateway_id: str, counted: MinutesCounted) -> None:
    flush = Flush(f"test {gateway_id}", next(NUMBERS))
    await minute_store.add(database, gateway_id, counted, flush, MINUTE)


async def test_a_flush_that_is_repeated_adds_nothing(database: Database, admin: Admin) -> None:
    for _ in range(2):
        await minute_store.add(database, "gw-1", _counted(1, 1), Flush("test", 1), MINUTE)
    (row,) = (await read_page(admin, FLOW, FlowQuery())).rows
    assert row.counts.served_tokens == 10


async def test_gateways_are_added_up_and_an_engine_is_counted_once(database: Database, admin: Admin) -> None:
    await _add(database, "gw-1", _counted(1, 2))
    await _add(database, "gw-2", _counted(1, 1))
    await _add(database, "gw-2", _counted(1, 1))  # it was restarted within the minute

    rows = (await read_page(admin, FLOW, FlowQuery())).rows
    assert [(row.key.tenant_id, row.counts.served_tokens, row.counts.fair_tokens) for row in rows] == [
        ("ten_0", 30, 30),
        ("ten_1", 10, 11),
    ]
    assert rows[0].as_json() == {
        "start": "2023-11-14T22:13:00+00:00",
        "pool": "pool",
        "tier": "standard",
        "tenant_id": "ten_0",
        "served_tokens": 30,
        "fair_tokens": 30,
        "mean_waiting_tokens": 30.0,
        "arrivals": 6,
        "mean_before_line_s": 0.5,
    }
    (engine,) = (await read_page(admin, ENGINES, EngineQuery())).rows
    assert engine.counts.steps == 200, "as the gateway says that saw it longest"
    assert engine.as_json()["kv_share"] == 0.5


async def test_pages_are_stable_while_minutes_arrive(database: Database, admin: Admin) -> None:
    await _add(database, "gw-1", _counted(5, 3))
    whole = [row.key for row in (await read_page(admin, FLOW, FlowQuery(), limit=1000)).rows]
    assert whole == sorted(whole)
    assert len(whole) == 15
    seen: list[FlowKey] = []
    cursor: str | None = None
    while True:
        page = await read_page(admin, FLOW, FlowQuery(), limit=4, cursor=cursor)
        seen += [row.key for row in page.rows]
        cursor = page.next_cursor
        if cursor is None:
            break
        await _add(database, "gw-2", _counted(1, 3))  # adds to rows that come later
    assert seen == whole
    engines = await read_page(admin, ENGINES, EngineQuery(), limit=2)
    more = await read_page(admin, ENGINES, EngineQuery(), limit=10, cursor=engines.next_cursor)
    assert [row.key for row in (*engines.rows, *more.rows)] == sorted(
        EngineKey(MINUTE - number * MINUTE_US, "pool", "engine-0") for number in range(1, 6)
    )


async def test_hours_are_sums_of_minutes_and_filters_filter(database: Database, admin: Admin) -> None:
    acme = await admin.tenants.create("test", TenantCreate(name="acme"))
    counted = _counted(90, 2)
    counted.flow[FlowKey(MINUTE - MINUTE_US, "other", "batch", acme.tenant_id)] = FlowMinute(7, 7)
    await _add(database, "gw-1", counted)

    hours = (await read_page(admin, FLOW, FlowQuery(window="hour", pool="pool"))).rows
    assert sum(row.counts.served_tokens for row in hours) == 90 * 2 * 10
    assert {row.key.minute_us % HOUR_US for row in hours} == {0}
    assert len((await read_page(admin, FLOW, FlowQuery(window="hour"), limit=1000)).rows) == len(hours) + 1
    cursor = (await read_page(admin, FLOW, FlowQuery(window="hour", pool="pool"), limit=3)).next_cursor
    rest = (await read_page(admin, FLOW, FlowQuery(window="hour", pool="pool"), cursor=cursor)).rows
    assert [row.key for row in rest] == [row.key for row in hours[3:]]
    (own,) = (await read_page(admin, FLOW, FlowQuery(tenant="acme", tier="batch"))).rows
    assert (own.key.pool, own.counts.served_tokens) == ("other", 7)
    assert (await read_page(admin, FLOW, FlowQuery(tenant="acme", pool="pool"))).rows == []
    assert (await read_page(admin, ENGINES, EngineQuery(replica="engine-1"))).rows == []
    since, until = "2023-11-14T22:00:30Z", "2023-11-14T22:01:30+00:00"
    assert len((await read_page(admin, FLOW, FlowQuery(since=since, until=until))).rows) == 4, (
        "both minutes, whole"
    )


@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        ("window", {"window": "day"}),
        ("tier", {"tier": "gold"}),
        ("pool", {"pool": "a\0b"}),
        ("limit", {"limit": 0}),
        ("cursor", {"cursor": "nonsense"}),
        ("from", {"since": "yesterday"}),
        ("from", {"since": "2013-11-14T22:00:00Z"}),
        ("from", {"since": "2023-11-14T22:00:00Z", "until": "2023-11-14T22:00:00Z"}),
        ("from", {"since": "2023-10-14T22:00:00Z", "until": "2023-11-14T22:00:00Z", "window": "hour"}),
        ("to", {"until": "2023-11-14T22:00:00"}),
    ],
)
async def test_what_cannot_be_asked_is_named(admin: Admin, field: str, wanted: dict) -> None:  # type: ignore[type-arg]
    pages = {name: wanted[name] for name in ("limit", "cursor") if name in wanted}
    wanted = {name: value for name, value in wanted.items() if name not in pages}
    with pytest.raises(Invalid) as caught:
        await read_page(admin, FLOW, FlowQuery(**wanted), **pages)
    assert caught.value.field == field


async def test_old_minutes_are_purged_an_hour_at_a_time(database: Database, admin: Admin) -> None:
    await _add(database, "gw-1", _counted(100, 1))
    newest_us = MINUTE - MINUTE_US

    async def kept() -> list[int]:
        def count(connection):  # type: ignore[no-untyped-def]
            return [
                connection.execute(select(func.count()).select_from(table)).scalar()
                for table in (flow_minutes, engine_minutes)
            ]

        found: list[int] = await database.read(count)
        return found

    await minute_store.purge(database, newest_us + KEPT_US - 90 * MINUTE_US)
    assert await kept() == [91, 91]
    await minute_store.purge(database, newest_us + KEPT_US)
    assert await kept() == [31, 31]
    await minute_store.purge(database, newest_us + KEPT_US)
    await minute_store.purge(database, newest_us + KEPT_US)
    assert await kept() == [1, 1]


async def test_the_table_is_read_by_its_minutes(database: Database, admin: Admin) -> None:
    """Of many minutes only those that are asked for."""
    await _add(database, "gw-1", _counted(300, 2))
    conditions = [flow_minutes.c.minute_us >= MINUTE - 5 * MINUTE_US, flow_minutes.c.minute_us < MINUTE]
    plans: list[str] = []

    def look(connection):  # type: ignore[no-untyped-def]
        is_sqlite = connection.dialect.name == "sqlite"
        if not is_sqlite:
            connection.execute(text("SET LOCAL enable_seqscan = off"))
        query = select(flow_minutes.c.served_tokens).where(*conditions)
        compiled = query.compile(connection, compile_kwargs={"literal_binds": True})
        explain = "EXPLAIN QUERY PLAN" if is_sqlite else "EXPLAIN"
        plans.extend(str(row) for row in connection.execute(text(f"{explain} {compiled}")))
        return minute_store.flow_by_window(connection, MINUTE_US, conditions, 1000)

    assert len(await database.read(look)) == 10
    plan = " ".join(plans)
    assert "SCAN" not in plan.upper() or "INDEX" in plan.upper(), plan
    assert "Seq Scan" not in plan


class Clock:
    now_s = 0.0

    def wall_s(self) -> float:
        return NOW_S + self.now_s


async def test_minutes_are_written_once_they_are_over_and_the_last_one_on_the_way_out(
    database: Database, admin: Admin
) -> None:
    clock = Clock()
    writer = MinuteWriter(site(database, clock.wall_s, gateway_id="gw-1"))
    meter = writer.flows["pool"] = FlowMeter("pool")

    def second(had: int) -> None:
        clock.now_s += 1
        meter.sample(clock.now_s, clock.wall_s(), {("ten_a", 1): had} if had else {}, ())

    meter.sample(0.0, NOW_S, {}, ())
    meter.lined_up("r1", "ten_a", 1, 100, FairTerms(), 0.0, 0.1)
    second(50)
    await writer.flush()
    commits = database.commits
    for _ in range(70):
        second(0)
    assert database.commits == commits, "nothing is written before the minute is over"
    await writer.flush()
    second(20)
    await writer.flush()
    await writer.flush()
    assert database.commits == commits + 1
    await writer.close()

    rows = (await read_page(admin, FLOW, FlowQuery(until="2023-11-14T22:20:00Z"))).rows
    assert [(row.key.minute_us - MINUTE, row.counts.served_tokens) for row in rows] == [
        (0, 50),
        (MINUTE_US, 20),
    ]


async def test_minutes_wait_for_a_database_that_is_down(sqlite_url: str) -> None:
    from tenants.storage.database import open_database

    database = open_database(sqlite_url)
    clock = Clock()
    writer = MinuteWriter(site(database, clock.wall_s, gateway_id="gw-1"))
    meter = writer.flows["pool"] = FlowMeter("pool")
    meter.sample(0.0, NOW_S, {}, ())
    meter.sample(1.0, NOW_S + 1, {("ten_a", 1): 5}, ())
    meter.sample(62.0, NOW_S + 62, {}, ())
    meter.sample(63.0, NOW_S + 63, {}, ())
    clock.now_s = 70.0
    await database.close()
    await writer.flush()  # says so, and keeps them
    with pytest.raises(DatabaseUnavailable):
        await minute_store.purge(database, 0)

    reopened = open_database(sqlite_url)
    writer._database = reopened
    await writer.flush()
    found = await reopened.read(lambda one: minute_store.flow_by_window(one, MINUTE_US, [], 10))
    assert [row.served_tokens for _, row in found] == [5]
    await reopened.close()


async def test_while_the_database_is_away_a_bounded_number_of_minutes_waits(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tenants.storage.database import open_database

    monkeypatch.setattr("gateway.explain.minutes.writer.MAX_WAITING", 2)
    database, clock, registry = open_database(sqlite_url), Clock(), CollectorRegistry()
    await database.close()
    writer = MinuteWriter(site(database, clock.wall_s, registry, "gw-1"))
    meter, engines = FlowMeter("pool"), EngineMeter("pool")
    writer.flows["pool"], writer.engines["pool"] = meter, engines
    replica = SimpleNamespace(replica_id="engine-0", is_up=True, ready=None, snapshot=None)
    for minute in range(7):
        clock.now_s = minute * 60.0
        meter.sample(clock.now_s, clock.wall_s(), {("ten_a", 1): 5}, ())
        engines.sample(clock.now_s, clock.wall_s(), [replica])
        await writer.flush()
    assert writer._unanswered is not None
    assert (len(writer._waiting.flow), len(writer._waiting.engines)) == (2, 2)
    # Of five minutes one is in the batch without an answer, two wait.
    assert registry.get_sample_value("fairgate_flow_rows_dropped_total") == 2 * 2


async def test_gateways_hear_of_each_other_through_redis_and_survive_its_loss(redis_url: str) -> None:
    """Told once, in order, on whatever clock; what could not be told is told later."""
    sides = {}
    for name, offset_s in (("east", 1000.0), ("west", 5.0)):
        log = LoadLog()
        share = PoolLoadShare(name, "1", log, FlowMeter("pool"))
        client = redis_client.Redis.from_url(redis_url)
        clock = partial(float, offset_s)
        feed = LoadFeed(client, "fairgate-test-load", clock, share)
        sides[name] = (offset_s, log, share, feed, client)
    east_s, _, east, east_feed, east_client = sides["east"]
    west_s, west_log, west, west_feed, west_client = sides["west"]

    east.arrived(QueueEntry("r1", "ten_a", east_s - 3.0, 10, 20, 1, 2.0), 1, FairTerms(2.0))
    await east_feed.exchange()
    await west_feed.exchange()
    await west_feed.exchange()
    (job,) = west_log.jobs(math.inf)
    assert (job.job_id, job.tenant_id, job.weight) == ("r1", "ten_a", 2.0)
    assert job.arrived_s == pytest.approx(west_s - 3.0, abs=1.0)

    class Broken:
        def pipeline(self, transaction: bool) -> None:
            raise OSError

    east_feed._redis, working = Broken(), east_feed._redis
    east.arrived(QueueEntry("r2", "ten_a", east_s, 10, 20, 1, 2.0), 1, FairTerms(2.0))
    await east_feed.exchange()  # it is lost
    east_feed._redis = working
    await east_feed.exchange()
    await west_feed.exchange()
    assert west.open_elsewhere() == {"east": 2}
    assert await east_client.xlen("fairgate-test-load") == 2
    await east_client.aclose()
    await west_client.aclose()
