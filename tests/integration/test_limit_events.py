"""Events of soft and shadow limits: counted, summed over gateways, bounded, never lost silently."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import NoReturn

import pytest

from gateway.budget import limit_alerts as writer
from gateway.budget.limit_alerts import LimitAlerts
from gateway.metrics.registry import Metrics
from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.errors import DatabaseUnavailable
from tenants.nouns.limit import LimitSet
from tenants.nouns.tenant import TenantCreate
from tenants.quota import alerts as limit_events
from tenants.quota.alerts import AlertTally, EventKey, EventKind, noticed
from tenants.quota.memory import MemoryQuotaStore
from tenants.quota.store import Granted, Hold
from tenants.resources.limits import LIMITS, LimitQuery
from tenants.resources.reading import read_all
from tenants.storage.database import Database, open_database
from tenants.types import Amounts, Limit, LimitMode, Meter, Window
from tests.support.builders import site
from tests.support.quota import NOON_S, Clock, limit

ACTOR = "cli:tester"
MINUTE = 1_700_136_000
"""When the minute of `NOON_S` began."""


def hold_of(count: int) -> Hold:
    amounts = Amounts(output_tokens=count)
    return Hold(amounts, amounts, amounts)


async def granted(store: MemoryQuotaStore, request_id: str, limits: list[Limit], count: int) -> Granted:
    answer = await store.reserve(request_id, limits, hold_of(count), 30)
    assert isinstance(answer, Granted)
    return answer


def soft(
    amount: int, *thresholds: int, limit_id: str = "lim_soft", window: Window | None = Window.MINUTE
) -> Limit:
    return replace(
        limit(amount=amount, mode=LimitMode.SOFT, window=window), limit_id=limit_id, thresholds=thresholds
    )


@pytest.fixture
def store(clock: Clock) -> MemoryQuotaStore:
    return MemoryQuotaStore(clock)


# ---------------------------------------------------------------- what is noticed (pure)


async def test_a_threshold_is_reached_by_use_and_holds_together(store: MemoryQuotaStore) -> None:
    watched = soft(100, 50, 80, 150)

    def levels(answer: Granted) -> list[int]:
        keys = noticed(answer)
        assert {(key.limit_id, key.window_start_s, key.kind) for key in keys} <= {
            ("lim_soft", MINUTE, EventKind.THRESHOLD)
        }
        return [key.level for key in keys]

    assert levels(await granted(store, "a", [watched], 49)) == []
    assert levels(await granted(store, "b", [watched], 1)) == [50]
    assert await store.settle("a", Amounts(output_tokens=49))
    assert levels(await granted(store, "c", [watched], 29)) == [50]
    assert levels(await granted(store, "d", [watched], 1)) == [50, 80]
    assert levels(await granted(store, "e", [watched], 70)) == [50, 80, 150]
    for request_id in "bcde":
        await store.settle(request_id, Amounts(requests=0))
    assert levels(await granted(store, "f", [watched], 0)) == [], "what was given back no longer counts"


async def test_shapes_without_windows_begin_at_zero(store: MemoryQuotaStore) -> None:
    bucket = replace(
        limit(amount=10, rate_per_s=1.0, mode=LimitMode.SOFT), limit_id="lim_bucket", thresholds=(80,)
    )
    running = replace(
        limit(Meter.CONCURRENCY, 1, mode=LimitMode.SOFT), limit_id="lim_running", thresholds=(100,)
    )
    for_ever = soft(10, 80, limit_id="lim_ever", window=Window.LIFETIME)
    keys = noticed(await granted(store, "a", [bucket, running, for_ever], 8))
    assert keys == [
        EventKey("lim_bucket", 0, EventKind.THRESHOLD, 80),
        EventKey("lim_running", 0, EventKind.THRESHOLD, 100),
        EventKey("lim_ever", 0, EventKind.THRESHOLD, 80),
    ]


async def test_a_shadow_limit_names_what_it_would_have_refused(store: MemoryQuotaStore) -> None:
    shadow = replace(limit(amount=10, mode=LimitMode.SHADOW, window=Window.MINUTE), limit_id="lim_shadow")
    hard = limit(amount=1_000)
    assert noticed(await granted(store, "a", [shadow, hard], 10)) == []
    would_deny = [EventKey("lim_shadow", MINUTE, EventKind.WOULD_DENY, 0)]
    assert noticed(await granted(store, "b", [shadow, hard], 1)) == would_deny


# ---------------------------------------------------------------- what is written


async def a_limit(database: Database, pepper: bytes) -> Limit:
    admin = Admin(Transactions(database, pepper, Clock()))
    await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    return await admin.limits.set(
        ACTOR,
        LimitSet(
            tenant="acme",
            meter="output_tokens",
            window="minute",
            amount=10,
            mode="soft",
            thresholds=[50, 100],
        ),
    )


def alerts(metrics: Metrics, kind: str) -> float:
    return metrics.registry.get_sample_value("fairgate_limit_events_total", {"kind": kind}) or 0.0


async def test_many_grants_become_one_row_and_two_gateways_add_up(
    database: Database, pepper: bytes, store: MemoryQuotaStore, clock: Clock
) -> None:
    watched = await a_limit(database, pepper)
    gateways = [LimitAlerts(site(database, clock), Metrics()) for _ in range(2)]
    for index in range(12):
        clock.advance(1)
        gateways[index % 2].note(await granted(store, f"r{index}", [watched], 1))
    commits = database.commits
    for gateway in gateways:
        await gateway.flush()
        await gateway.flush()
    assert database.commits == commits + 2, "an empty flush writes nothing"
    admin = Admin(Transactions(database, pepper, clock))
    shown = await admin.limits.show(watched.limit_id)
    assert [(event.key.level, event.count) for event in shown.events] == [(50, 8), (100, 3)]
    first, last = shown.events[0].first, shown.events[0].last
    assert (first.timestamp(), last.timestamp()) == (NOON_S + 5, NOON_S + 12)
    assert shown.as_json()["events"][0]["window_start"] == "2023-11-16T12:00:00+00:00"


async def test_an_alert_is_given_once_for_each_window_and_level(
    database: Database, pepper: bytes, store: MemoryQuotaStore, clock: Clock
) -> None:
    watched = await a_limit(database, pepper)
    metrics = Metrics()
    events = LimitAlerts(site(database, clock), metrics)
    for index in range(3):
        events.note(await granted(store, f"a{index}", [watched], 5))
    assert alerts(metrics, "threshold") == 2
    clock.advance(60)
    events.note(await granted(store, "next window", [watched], 5))
    assert alerts(metrics, "threshold") == 3
    shadow = replace(watched, mode=LimitMode.SHADOW, amount=0, meter=Meter.REQUESTS)
    for index in range(3):
        events.note(await granted(store, f"s{index}", [shadow], 1))
    assert alerts(metrics, "would_deny") == 3, "each request that would have been refused counts"
    await events.flush()
    admin = Admin(Transactions(database, pepper, clock))
    [listed] = await read_all(admin, LIMITS, LimitQuery(tenant="acme"))
    assert {(event.key.window_start_s, event.key.kind) for event in listed.events} == {
        (MINUTE + 60, EventKind.THRESHOLD),
        (MINUTE + 60, EventKind.WOULD_DENY),
    }, "a list shows the newest window only"


async def test_what_cannot_be_written_waits_and_is_bounded(
    sqlite_url: str, pepper: bytes, store: MemoryQuotaStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_WAITING", 2)
    down = open_database(sqlite_url)
    watched = await a_limit(down, pepper)
    await down.close()
    metrics = Metrics()
    events = LimitAlerts(site(down, clock), metrics)
    events.note(await granted(store, "a", [watched], 10))
    await events.close()
    clock.advance(1)
    events.note(await granted(store, "b", [watched], 1))
    await events.close()
    clock.advance(60)
    events.note(await granted(store, "c", [watched], 10))
    assert alerts(metrics, "dropped") == 2, "the levels of the next window find no room"
    up = open_database(sqlite_url)
    events._database = up
    await events.close()
    shown = await Admin(Transactions(up, pepper, clock)).limits.show(watched.limit_id)
    assert [(event.key.level, event.count) for event in shown.events] == [(50, 2), (100, 2)]
    assert (shown.events[0].first.timestamp(), shown.events[0].last.timestamp()) == (NOON_S, NOON_S + 1)
    await up.close()


async def test_what_is_counted_while_a_write_fails_is_added_to_it(
    database: Database, pepper: bytes, store: MemoryQuotaStore, clock: Clock
) -> None:
    watched = await a_limit(database, pepper)
    asked, gone = asyncio.Event(), asyncio.Event()

    class Away(Database):
        async def write(self, work: object) -> NoReturn:
            asked.set()
            await gone.wait()
            raise DatabaseUnavailable("away")

    away = Away(database.url)
    events = LimitAlerts(site(away, clock), Metrics())
    events.note(await granted(store, "a", [watched], 5))
    writing = asyncio.create_task(events.close())
    await asked.wait()
    events.note(await granted(store, "b", [watched], 1))
    gone.set()
    await writing
    events._database = database
    await events.flush()
    await away.close()
    [event] = (await Admin(Transactions(database, pepper, clock)).limits.show(watched.limit_id)).events
    assert (event.key.level, event.count) == (50, 2)


async def test_only_the_newest_windows_are_kept(
    database: Database, pepper: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit_events, "MAX_WINDOWS_KEPT", 3)
    watched = await a_limit(database, pepper)
    for window in (60, 120, 240, 180, 300):
        tallies = {
            EventKey(watched.limit_id, window, EventKind.THRESHOLD, level): AlertTally(1, window, window)
            for level in (50, 100)
        }
        await limit_events.add(database, tallies)
    events = (await Admin(Transactions(database, pepper)).limits.show(watched.limit_id)).events
    assert [event.key.window_start_s for event in events] == [300, 300, 240, 240, 180, 180]


async def test_events_go_with_their_limit_and_late_ones_find_nothing(
    database: Database, pepper: bytes
) -> None:
    watched = await a_limit(database, pepper)
    tallies = {EventKey(watched.limit_id, 60, EventKind.THRESHOLD, 50): AlertTally(1, 1, 1)}
    admin = Admin(Transactions(database, pepper))
    await limit_events.add(database, tallies)
    await admin.limits.remove(ACTOR, watched.limit_id)
    await limit_events.add(database, tallies)

    ids = [watched.limit_id]
    assert await database.read(lambda connection: limit_events.events_of(connection, ids)) == {}
