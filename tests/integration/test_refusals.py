"""Refusals: counted exactly, bounded in rows, written once, found by what they were refused by."""

from __future__ import annotations

import asyncio
import base64
import threading

import pytest
from sqlalchemy import Connection, func, select

from gateway import errors
from gateway.errors import ApiError, Lacked
from gateway.metrics.registry import Metrics
from gateway.records import refusal_recorder
from gateway.records.key_use_recorder import KeyUseRecorder
from gateway.records.refusal_recorder import WHOLE_OF_A_KIND, RefusalRecorder
from tenants.admin.admin import Admin
from tenants.counts import refusal_store
from tenants.counts.refusal_store import RefusedRequest
from tenants.directory import key_uses
from tenants.errors import DatabaseUnavailable, Invalid, NotFound
from tenants.nouns.key import KeyCreate
from tenants.nouns.tenant import TenantCreate
from tenants.resources.reading import read_page
from tenants.resources.records.counts import REFUSAL_COUNTS, RefusalCountQuery
from tenants.resources.records.refusals import REFUSALS, RefusalQuery
from tenants.storage.database import Database, open_database
from tenants.storage.tables import flushes, refusal_counts, refusals
from tests.support.builders import site
from tests.support.quota import NOON_S, Clock

ACTOR = "cli:tester"
IDS = ("ten_a", "prj_a", "key_a")


@pytest.fixture
def recorder(database: Database, clock: Clock) -> RefusalRecorder:
    return RefusalRecorder(site(database, clock), Metrics())


def denied(limit_id: str = "lim_1", wanted: int = 50, available: int = 7) -> ApiError:
    error = errors.rate_limited("no", "tokens", 1.5)
    error.lacked = Lacked(limit_id, wanted, available)
    return error


async def total(database: Database) -> tuple[int, int]:
    """Refusals counted, and rows kept whole."""

    def read(connection):  # type: ignore[no-untyped-def]
        counted = connection.execute(select(func.sum(refusal_counts.c["count"]))).scalar()
        return int(counted or 0), connection.execute(select(func.count()).select_from(refusals)).scalar()

    return await database.read(read)


async def test_a_flood_is_counted_exactly_and_few_of_it_are_kept_whole(
    database: Database, recorder: RefusalRecorder, clock: Clock
) -> None:
    for number in range(10_000):
        recorder.note(denied(), f"req_{number}", IDS, model=f"made-up-{number}", tier="batch")
        if number % 2_500 == 0:
            await recorder.flush()  # the bound holds over flushes, too
    await recorder.flush()
    assert await total(database) == (10_000, WHOLE_OF_A_KIND)
    clock.now_s += 60
    recorder.note(denied(), "req_later", IDS)
    recorder.note(denied("lim_2"), "req_other_limit", IDS)
    recorder.note(errors.engine_unavailable(), "req_other_code", IDS)
    recorder.note(denied(), "req_other_tenant", ("ten_b", "prj_b", "key_b"))
    await recorder.flush()
    assert await total(database) == (10_004, WHOLE_OF_A_KIND + 4)
    whole = await database.read(lambda connection: refusal_store.find(connection, "req_0"))
    assert whole == RefusedRequest(
        "req_0",
        round(NOON_S * 1e6),
        "rate_limit_exceeded",
        *IDS,
        tier="batch",
        model="made-up-0",
        limit_id="lim_1",
        wanted=50,
        available=7,
        retry_after_ms=1_500,
    )
    assert await database.read(lambda connection: refusal_store.find(connection, "req_9999")) is None


async def test_one_tenant_does_not_take_the_place_of_others(
    database: Database, recorder: RefusalRecorder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal_recorder, "WHOLE_OF_A_DAY", 20)
    for minute in range(10):
        for number in range(10):
            recorder.note(denied(), f"req_{minute}_{number}", IDS)
        clock.now_s += 60
    recorder.note(denied(), "req_b", ("ten_b", "", ""))
    await recorder.flush()
    assert await total(database) == (101, 21)
    clock.now_s += 86_400
    recorder.note(denied(), "req_next_day", IDS)
    await recorder.flush()
    assert await total(database) == (102, 22)


@pytest.mark.parametrize("is_committed", [True, False])
async def test_a_flush_whose_answer_was_lost_is_repeated_and_counts_once(
    database: Database, recorder: RefusalRecorder, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    real, written = refusal_store.add, []

    async def lost(*arguments: object) -> None:
        written.append(arguments[3])
        if is_committed:
            await real(*arguments)  # type: ignore[arg-type]
        raise DatabaseUnavailable("the connection was lost")

    recorder.note(denied(), "req_1", IDS)
    with monkeypatch.context() as patched:
        patched.setattr(refusal_store, "add", lost)
        await recorder.flush()
        recorder.note(denied(), "req_2", IDS)
        await recorder.flush()
    assert written[0] == written[1], "the same flush again, before anything newer"
    found = await recorder.find("req_1")
    assert found is not None
    assert found.request_id == "req_1"
    await recorder.flush()
    assert await total(database) == (2, 2)
    await recorder.flush()
    assert await total(database) == (2, 2)


async def test_while_the_database_is_away_counts_are_merged_and_none_is_lost(
    database: Database, recorder: RefusalRecorder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal_recorder, "MAX_COUNTS", 100)
    for minute in range(200):
        for tenant in range(3):
            recorder.note(denied(), f"req_{minute}_{tenant}", (f"ten_{tenant}", "", ""))
        clock.now_s += 60
    assert len(recorder._counts) <= 100
    await recorder.flush()

    def by_tenant(connection):  # type: ignore[no-untyped-def]
        of = refusal_counts.c
        return dict(
            connection.execute(select(of.tenant_id, func.sum(of["count"])).group_by(of.tenant_id)).all()
        )

    assert await database.read(by_tenant) == {"ten_0": 200, "ten_1": 200, "ten_2": 200}


async def test_two_gateways_add_up(database_url: str, clock: Clock) -> None:
    databases = [open_database(database_url) for _ in range(2)]
    try:
        gateways = [RefusalRecorder(site(database, clock), Metrics()) for database in databases]
        for number in range(40):
            for index, gateway in enumerate(gateways):
                gateway.note(denied(f"lim_{number % 4}"), f"req_{index}_{number}", IDS)
            if number % 10 == 9:
                await asyncio.gather(*(gateway.flush() for gateway in gateways))
        counted, whole = await total(databases[0])
        assert (counted, whole) == (80, 2 * 4 * WHOLE_OF_A_KIND)
    finally:
        for database in databases:
            await database.close()


async def test_what_a_client_made_up_is_stored_as_every_database_takes_it(
    database: Database, recorder: RefusalRecorder
) -> None:
    recorder.note(errors.model_not_found(name="x"), "req_long", IDS, model="m" * 100_000)
    recorder.note(errors.model_not_found(name="x"), "req_nul", IDS, model="a\x00b\u2028c")
    recorder.note(errors.malformed_http(), "req_unknown")
    await recorder.flush()
    found = [
        await database.read(lambda connection, each=each: refusal_store.find(connection, each))
        for each in ("req_long", "req_nul", "req_unknown")
    ]
    assert [each and each.model for each in found] == ["m" * 256, "a?b?c", ""]
    assert found[2] is not None
    assert found[2].as_json()["tenant_id"] is None


async def test_old_refusals_go_and_minutes_become_hours(
    database: Database, recorder: RefusalRecorder, clock: Clock
) -> None:
    for number in range(130):
        recorder.note(denied(), f"req_{number}", IDS)
        clock.now_s += 60
    await recorder.flush()
    _, whole = await total(database)
    clock.now_s += refusal_store.KEPT_MINUTES_S
    await recorder.purge()
    await recorder.purge()
    assert await total(database) == (130, whole), "added up, not lost"

    def starts(connection):  # type: ignore[no-untyped-def]
        return list(connection.execute(select(refusal_counts.c.minute_s)).scalars())

    assert all(start % 3600 == 0 for start in await database.read(starts))
    clock.now_s += refusal_store.KEPT_ROWS_S
    await recorder.purge()
    assert await total(database) == (130, 0)
    clock.now_s += refusal_store.KEPT_COUNTS_S
    await recorder.purge()
    assert await total(database) == (0, 0)
    assert await database.read(lambda c: c.execute(select(func.count()).select_from(flushes)).scalar()) == 0


async def test_the_oldest_rows_beyond_the_bound_go(
    database: Database, recorder: RefusalRecorder, clock: Clock
) -> None:
    for number in range(30):
        recorder.note(denied(f"lim_{number}"), f"req_{number:02}", IDS)
        clock.now_s += 1
    await recorder.flush()
    await refusal_store.purge(database, clock.now_s, most_rows=10)
    left = await database.read(lambda connection: refusal_store.where(connection, [], 100))
    assert [row.request_id for row in left] == [f"req_{number}" for number in range(29, 19, -1)]


# ---------------------------------------------------------------- reads


async def test_pages_go_on_where_they_ended_while_rows_arrive(
    admin: Admin, recorder: RefusalRecorder, clock: Clock
) -> None:
    tenant = await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    ids = (tenant.tenant_id, "prj", "key")
    for number in range(25):
        recorder.note(denied(f"lim_{number}"), f"req_{number:02}", ids)
        clock.now_s += 0 if number % 2 else 1  # some at one instant
    await recorder.flush()
    query, seen, cursor = RefusalQuery(tenant="acme"), [], None
    while True:
        page = await read_page(admin, REFUSALS, query, cursor=cursor, limit=10)
        seen += [row.request_id for row in page.rows]
        cursor = page.next_cursor
        if cursor is None:
            break
        recorder.note(denied(f"lim_{cursor}"[:40]), f"req_new_{len(seen)}", ids)
        await recorder.flush()
    assert seen == sorted(seen, reverse=True)
    assert len(seen) == len(set(seen)) == 25
    first = await read_page(admin, REFUSALS, query, limit=1)
    with pytest.raises(Invalid, match="cursor"):
        await read_page(admin, REFUSALS, RefusalQuery(), cursor=first.next_cursor)
    with pytest.raises(Invalid, match="cursor"):
        await read_page(admin, REFUSALS, query, cursor=first.next_cursor, of_tenant=tenant.tenant_id)


async def test_a_tenants_cursor_names_no_request_of_another(
    admin: Admin, recorder: RefusalRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenants.admin.lists.scans.MOST_SCANNED", 2)
    acme = await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    other = await admin.tenants.create(ACTOR, TenantCreate(name="other"))
    for number in range(3):
        recorder.note(denied("lim_theirs"), f"req_theirs_{number}", (other.tenant_id, "", ""))
        recorder.note(denied("lim_mine"), f"req_mine_{number}", (acme.tenant_id, "", ""))
    await recorder.flush()
    query, cursor = RefusalQuery(limit_id="lim_theirs"), None
    while True:
        page = await read_page(admin, REFUSALS, query, cursor=cursor, of_tenant=acme.tenant_id)
        assert page.rows == []
        cursor = page.next_cursor
        if cursor is None:
            break
        shown = base64.urlsafe_b64decode(cursor + "==")
        assert b"req_mine" in shown
        assert b"req_theirs" not in shown


async def test_each_filter_finds_its_own(admin: Admin, recorder: RefusalRecorder) -> None:
    acme = await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    other = await admin.tenants.create(ACTOR, TenantCreate(name="other"))
    key, _ = await admin.keys.create(ACTOR, KeyCreate(tenant="acme"))
    mine = (acme.tenant_id, key.project_id, key.key_id)
    recorder.note(denied("lim_mine"), "req_mine", mine, model="m", tier="batch")
    recorder.note(errors.engine_unavailable(), "req_other", (other.tenant_id, "", ""), model="n")
    of_platform = denied("lim_all")
    of_platform.lacked = Lacked("lim_all", 5, 1, of_platform=True)
    recorder.note(of_platform, "req_platform", mine)
    await recorder.flush()

    async def found(of_tenant: str | None = None, **given: str) -> set[str]:
        page = await read_page(admin, REFUSALS, RefusalQuery(**given), of_tenant=of_tenant)
        return {row.request_id for row in page.rows}

    assert await found() == {"req_mine", "req_other", "req_platform"}
    for given in (
        {"request_id": "req_mine"},
        {"key": key.key_id, "model": "m"},
        {"project": key.project_id, "tier": "batch"},
        {"limit_id": "lim_mine"},
    ):
        assert await found(**given) == {"req_mine"}, given
    assert await found(tenant="acme", project="default") == {"req_mine", "req_platform"}
    assert await found(code="engine_unavailable") == {"req_other"}
    assert await found(since="2030-01-01T00:00:00Z") == set()
    assert await found(of_tenant=acme.tenant_id) == {"req_mine", "req_platform"}
    assert await found(of_tenant=acme.tenant_id, limit_id="lim_mine") == {"req_mine"}
    assert await found(of_tenant=acme.tenant_id, limit_id="lim_all") == set(), "it is not told of it"
    page = await read_page(admin, REFUSALS, RefusalQuery(request_id="req_platform"), of_tenant=acme.tenant_id)
    assert (page.rows[0].limit_id, page.rows[0].wanted) == ("", None)


async def test_bad_filters_are_named(admin: Admin) -> None:
    for field, given in {
        "tier": {"tier": "gold"},
        "request_id": {"request_id": "x" * 81},
        "model": {"model": "a\x00b"},
        "from": {"since": "yesterday"},
        "to": {"until": "2026-01-01"},
    }.items():
        with pytest.raises(Invalid) as refused:
            await read_page(admin, REFUSALS, RefusalQuery(**given))
        assert refused.value.field == field
    with pytest.raises(Invalid, match="before"):
        await read_page(
            admin, REFUSALS, RefusalQuery(since="2026-01-02T00:00:00Z", until="2026-01-01T00:00:00Z")
        )
    with pytest.raises(NotFound):
        await read_page(admin, REFUSALS, RefusalQuery(tenant="nobody"))
    for query, field in (
        (RefusalCountQuery(window="day"), "window"),
        (RefusalCountQuery(group_by="colour"), "group_by"),
        (RefusalCountQuery(since="2016-01-01T00:00:00Z"), "from"),
    ):
        with pytest.raises(Invalid) as wrong:
            await read_page(admin, REFUSAL_COUNTS, query)
        assert wrong.value.field == field


async def test_counts_by_time_and_groups_in_pages(
    admin: Admin, recorder: RefusalRecorder, clock: Clock
) -> None:
    tenant = await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    start_s = clock.now_s
    for minute in range(120):
        recorder.note(denied(f"lim_{minute % 2}"), f"req_{minute}", (tenant.tenant_id, "", ""))
        recorder.note(errors.malformed_http(), f"req_bad_{minute}")
        clock.now_s += 60
    await recorder.flush()

    async def everything(query: RefusalCountQuery) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = []
        cursor = None
        while True:
            page = await read_page(admin, REFUSAL_COUNTS, query, cursor=cursor, limit=7)
            rows += [row.shown for row in page.rows]
            cursor = page.next_cursor
            if cursor is None:
                return rows

    hours = await everything(RefusalCountQuery())
    assert sum(int(str(row["count"])) for row in hours) == 240
    assert {(row["tenant_id"], row["code"], row["limit_id"]) for row in hours} == {
        (tenant.tenant_id, "rate_limit_exceeded", "lim_0"),
        (tenant.tenant_id, "rate_limit_exceeded", "lim_1"),
        ("", "malformed_http", ""),
    }
    minutes = await everything(RefusalCountQuery(window="minute", group_by="", tenant="acme"))
    assert [row["count"] for row in minutes] == [1] * 60, "without `from` the last hour"
    of_limit = await everything(RefusalCountQuery(group_by="code", limit_id="lim_1"))
    assert sum(int(str(row["count"])) for row in of_limit) == 60
    assert set(of_limit[0]) == {"start", "code", "count"}
    assert start_s == NOON_S


# ---------------------------------------------------------------- uses of keys


async def test_the_last_use_of_a_key_is_the_latest_of_all_gateways(
    database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late = KeyUseRecorder(site(database, clock)), KeyUseRecorder(site(database, clock))
    early.note("key_a")
    clock.now_s += 100
    late.note("key_a")
    late.note("key_b")
    await late.flush()
    await early.flush()
    uses = await database.read(lambda c: key_uses.last_uses(c, ["key_a", "key_b", "key_never"]))
    assert uses == dict.fromkeys(("key_a", "key_b"), round(clock.now_s * 1e6))

    def away(*_: object, **__: object) -> None:
        raise DatabaseUnavailable("away")

    clock.now_s += 1
    with monkeypatch.context() as patched:
        patched.setattr(key_uses, "note", away)
        early.note("key_a")
        await early.close()
    await early.close()
    uses = await database.read(lambda c: key_uses.last_uses(c, ["key_a"]))
    assert uses == {"key_a": round(clock.now_s * 1e6)}


async def test_uses_of_keys_that_are_being_written_survive_the_end_of_a_gateway(
    database: Database, clock: Clock
) -> None:
    recorder = KeyUseRecorder(site(database, clock))
    recorder.note("key_a")
    begun, goes_on = threading.Event(), threading.Event()

    def hold(_: Connection) -> None:
        begun.set()
        goes_on.wait()

    held = asyncio.create_task(database.write(hold))
    await asyncio.to_thread(begun.wait)
    flush = asyncio.create_task(recorder.flush())
    await asyncio.sleep(0)  # it waits behind the held write
    flush.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flush
    flush = asyncio.create_task(recorder.flush())
    await asyncio.sleep(0)
    clock.now_s += 5
    recorder.note("key_a")  # used again while it is written
    goes_on.set()
    await held
    await flush
    await recorder.close()
    uses = await database.read(lambda c: key_uses.last_uses(c, ["key_a"]))
    assert uses == {"key_a": round(clock.now_s * 1e6)}
