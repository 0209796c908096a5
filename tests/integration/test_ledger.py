"""Ledger rows are written once and kept, and suffice to rebuild every counter."""

from __future__ import annotations

import asyncio
import itertools
import threading
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, event, select, text

from tenants.errors import EpochEnded, Invalid
from tenants.ledger.batch_insert import ROWS_PER_STATEMENT
from tenants.ledger.counter_sets import set_id
from tenants.ledger.ledger import Ledger, _append, _new_row
from tenants.ledger.replay import charged_sums
from tenants.ledger.rows import Kind, LedgerRow
from tenants.quota import rules
from tenants.quota.memory import MemoryQuotaStore
from tenants.quota.store import Granted, Hold
from tenants.storage.database import Database, open_database
from tenants.storage.tables import counter_sets
from tenants.types import Amounts, Limit, Meter, SubjectKind, Tier, Window
from tests.support.quota import NOON_S, Clock, limit, on_platform, on_user

NOON = datetime.fromtimestamp(NOON_S, UTC)


def row(
    request_id: str = "r", kind: Kind = "reserve", amounts: Amounts | None = None, **changes: Any
) -> LedgerRow:
    made = LedgerRow(
        request_id=request_id,
        kind=kind,
        tenant_id="ten_a",
        project_id="prj_a",
        key_id="key_a",
        gateway_id="gw_1",
        tier="standard",
        model="small",
        amounts=amounts or Amounts(10, 20, 3_000, 1),
        outcome="" if kind == "reserve" else "stop",
        at=NOON,
    )
    return replace(made, **changes)


@pytest.fixture
def ledger(database: Database) -> Ledger:
    return Ledger(database)


async def test_a_row_comes_back_as_it_was_written(ledger: Ledger) -> None:
    reserve = row(
        at=NOON + timedelta(microseconds=1),
        detail={"prompt_tokens": [3, 4], "cause": "x"},
        charged_to=("a", "b@1"),
        amounts=Amounts(1, 2, 4_500_000_000_000_000, 1),
        labels={"team": "sèarch", "feature": "x"},
    )
    settle = row(kind="settle", outcome="length", amounts=Amounts(1, 0, 0, 1))
    assert await ledger.append(reserve)
    assert await ledger.append(settle)
    assert await ledger.find("r") == [reserve, settle]
    assert await ledger.find("other") == []


async def test_the_same_row_is_written_once_however_often_it_is_sent(ledger: Ledger) -> None:
    first = row(kind="settle", charged_to=())
    answers = await asyncio.gather(*(ledger.append(first) for _ in range(20)))
    assert sorted(answers) == [False] * 19 + [True]
    assert await ledger.append(replace(first, amounts=Amounts(999, 0, 0, 1))) is False
    assert await ledger.find("r") == [first]
    assert await ledger.append(row(charged_to=("a",)))
    assert await ledger.append(row(charged_to=("b",))) is False
    assert (await ledger.find("r"))[-1].charged_to == ("a",)


async def test_rows_that_are_written_together_are_those_that_are_written_one_by_one(
    ledger: Ledger, database: Database
) -> None:
    number = 2 * ROWS_PER_STATEMENT + 3
    rows = [
        row(f"r{index}", charged_to=("a", f"b@{index}"), detail={"most": [index]}, price_version=index)
        if index % 2
        else row(f"r{index}", "settle", counted_input=index, outcome="léngth")
        for index in range(number)
    ]
    entered, leave = threading.Event(), threading.Event()

    def hold(_: Connection) -> None:
        entered.set()
        assert leave.wait(30)

    holding = asyncio.create_task(database.write(hold))
    await asyncio.to_thread(entered.wait, 30)
    together = [asyncio.create_task(ledger.append(each)) for each in rows]
    await asyncio.sleep(0)
    commits = database.commits
    leave.set()
    assert await asyncio.gather(*together) == [True] * number
    await holding
    assert database.commits == commits + 2, "one for the writer that was held, one for all rows"
    for each in rows:
        alone = replace(each, request_id=f"{each.request_id}-alone")
        assert await ledger.append(alone)
        assert await ledger.find(alone.request_id) == [alone]
        assert await ledger.find(each.request_id) == [each]


async def test_a_row_that_was_there_does_not_hide_that_others_beside_it_are_new(
    ledger: Ledger, database: Database
) -> None:
    await ledger.append(row("old", charged_to=("a",)))
    epoch = await ledger.next_epoch()
    entered, leave = threading.Event(), threading.Event()

    def hold(_: Connection) -> None:
        entered.set()
        assert leave.wait(30)

    holding = asyncio.create_task(database.write(hold))
    await asyncio.to_thread(entered.wait, 30)
    rows = [row("new1"), row("old", charged_to=("b",)), row("new2"), row("new1")]
    sent = [asyncio.create_task(ledger.append(each)) for each in rows]
    sent.append(asyncio.create_task(ledger.append(row("late"), epoch="another")))
    sent.append(asyncio.create_task(ledger.append(row("in-time"), epoch=epoch)))
    await asyncio.sleep(0)
    leave.set()
    await holding
    answers = await asyncio.gather(*sent, return_exceptions=True)
    assert answers[:4] == [True, False, True, False]
    assert isinstance(answers[4], EpochEnded)
    assert answers[5] is True
    assert await ledger.find("old") == [row("old", charged_to=("a",))]
    assert await ledger.find("late") == []


async def test_two_processes_charge_a_request_once(ledger: Ledger, database_url: str) -> None:
    other = open_database(database_url)
    rows = [row(f"r{index}", "settle") for index in range(30)]
    sent = [ledger.append(each) for each in rows] + [Ledger(other).append(each) for each in reversed(rows)]
    assert sum(await asyncio.gather(*sent)) == 30
    await other.close()


async def test_what_was_reserved_and_not_settled_is_open(ledger: Ledger) -> None:
    for index in range(6):
        await ledger.append(row(f"r{index}", gateway_id=f"gw_{index % 2}", charged_to=("a",)))
    await ledger.append(row("r0", "settle"))
    await ledger.append(row("r3", "settle", gateway_id="gw_other"))
    await ledger.append(row("r2", "credit"))
    assert [each.request_id for each in await ledger.open_requests("gw_0")] == ["r2", "r4"]
    assert [each.request_id for each in await ledger.open_requests()] == ["r1", "r2", "r4", "r5"]
    assert [each.request_id for each in await ledger.open_requests(most=1)] == ["r1"]
    assert (await ledger.open_requests("gw_0"))[0].reserve.charged_to == ("a",)


async def test_what_many_are_charged_to_is_written_once(database: Database, ledger: Ledger) -> None:
    await ledger.append(row("r0", charged_to=("b", "a", "b")))
    await ledger.append(row("r1", charged_to=("a", "b")))
    await asyncio.gather(*(ledger.append(row(f"r{index}", charged_to=("b", "a"))) for index in range(2, 9)))
    # A writer that does not know of it writes it again.
    await Ledger(database).append(row("r9", charged_to=("a", "b")))
    await ledger.append(row("other", charged_to=("a",)))
    await ledger.append(row("none"))
    written = await database.read(
        lambda connection: [tuple(each) for each in connection.execute(select(counter_sets))]
    )
    names = {counters: set_id(counters) for counters in [("a", "b"), ("a",)]}
    expected = [("gw_1", name, each) for counters, name in names.items() for each in counters]
    assert sorted(written) == sorted(expected)
    found = await ledger.open_requests()
    assert [each.reserve.charged_to for each in found] == [("a", "b")] * 10 + [("a",), ()]


async def test_a_set_is_not_taken_for_written_before_it_is(ledger: Ledger) -> None:
    ended = await ledger.next_epoch()
    await ledger.next_epoch()
    with pytest.raises(EpochEnded):
        await ledger.append(row(charged_to=("a",)), epoch=ended)
    await ledger.append(row(charged_to=("a",)))
    # And not where the row was there already, charged to something else.
    assert not await ledger.append(row(charged_to=("b",)))
    await ledger.append(row("next", charged_to=("b",)))
    assert [each.reserve.charged_to for each in await ledger.open_requests()] == [("a",), ("b",)]


@pytest.mark.parametrize("look", ["open requests", "totals", "sums"])
async def test_what_is_looked_for_is_found_by_its_index(sqlite_url: str, look: str) -> None:
    # Partial indexes: SQLite does not use one where the query says its condition in other words.
    database = open_database(sqlite_url)
    plans: list[str] = []

    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, *_: object) -> None:
        if statement.startswith("SELECT"):
            rows = connection.connection.driver_connection.execute(
                f"EXPLAIN QUERY PLAN {statement}", parameters
            )
            plans.append("; ".join(each[3] for each in rows))

    event.listen(database._read_engine, "before_cursor_execute", explain)
    ledger = Ledger(database)
    match look:
        case "open requests":
            await ledger.open_requests("gw_1", most=5)
            expected = ["SEARCH ledger USING INDEX ix_ledger_gateway_id_counter_set (gateway_id=?)"]
        case "totals":
            await ledger.totals(tenant_id="ten_a", since=NOON)
            expected = ["SEARCH ledger USING INDEX ix_ledger_tenant_id_at_us (tenant_id=? AND at_us>?)"]
        case _:
            await database.read(lambda connection: charged_sums(connection, ["a"]))
            of_set = "ix_ledger_gateway_id_counter_set (gateway_id=? AND counter_set=?)"
            expected = [
                "SEARCH counter_sets USING INDEX ix_counter_sets_counter (counter=?)",
                f"SEARCH names USING INDEX {of_set}",
                "SEARCH ledger USING INDEX sqlite_autoindex_ledger_1 (request_id=? AND kind=?)",
            ]
    assert [each for each in expected if each not in plans[0]] == [], plans
    await database.close()


async def test_top_ups_are_numbered_written_once_and_add_up(ledger: Ledger) -> None:
    await ledger.append(row(detail={"most": [10, 100, 9_000, 1, 0], "may_be_cut": False}))
    first = row(
        kind="top_up", number=1, amounts=Amounts(0, 16, 1_600, 0), detail={"used": [10, 18, 2_800, 1, 0]}
    )
    second = replace(first, number=2, detail={"used": [10, 30, 4_000, 1, 0]})
    assert await ledger.append(first)
    assert await ledger.append(replace(first, amounts=Amounts(0, 99, 0, 0))) is False
    assert await ledger.append(second)
    [found] = await ledger.open_requests()
    assert found.held == Amounts(10, 52, 6_200, 1)
    assert found.used == Amounts(10, 30, 4_000, 1)
    assert found.worst == Amounts(10, 100, 9_000, 1)
    assert not found.may_be_cut
    assert found.top_ups == (first, second)
    assert await ledger.find("r") == [found.reserve, first, second]
    await ledger.append(row(kind="settle", amounts=Amounts(10, 31, 4_100, 1)))
    assert await ledger.open_requests() == []
    assert [each.held for each in await ledger.reserved(["r", "other"])] == [found.held]
    [total] = await ledger.totals()
    assert (total.requests, total.output_tokens) == (1, 31), "what was held is no charge"


async def test_of_two_settlements_the_first_counts_and_both_are_told(ledger: Ledger) -> None:
    one, other = row(kind="settle"), row(kind="settle", amounts=Amounts(1, 1, 1, 1), gateway_id="gw_2")
    counts = await asyncio.gather(ledger.settle(one), ledger.settle(other))
    assert counts[0] == counts[1]
    assert counts[0] in (one, other)
    assert await ledger.settled(["r", "x"]) == {"r": counts[0]}


async def test_weighted_tokens_are_counted_and_real_ones_billed(ledger: Ledger) -> None:
    on = limit(amount=10_000)
    await ledger.append(row(charged_to=("tenant:ten_a:total_tokens:lifetime/UTC:*@0",)))
    settle = row(kind="settle", amounts=Amounts(10, 20, 3_000, 1), counted_input=5, counted_output=40)
    await ledger.append(settle)
    assert (await ledger.find("r"))[1] == settle
    assert settle.counted == Amounts(5, 40, 3_000, 1)
    assert (await ledger.standing([on], NOON)).used == [(on, 45)]
    assert (await ledger.totals())[0].output_tokens == 20


async def test_a_row_is_taken_only_in_the_epoch_of_its_hold(ledger: Ledger) -> None:
    assert await ledger.epoch() == ""
    first = await ledger.next_epoch()
    assert await ledger.append(row("r1"), epoch=first)
    second = await ledger.next_epoch()
    assert await ledger.epoch() == second != first
    with pytest.raises(EpochEnded):
        await ledger.append(row("r2"), epoch=first)
    assert [each.request_id for each in await ledger.open_requests()] == ["r1"]
    assert await ledger.append(row("r2"), epoch=second)
    assert await ledger.append(row("r1", "settle"))
    assert await ledger.append(row("r3")), "a store that cannot lose its counters has no epochs"


async def test_what_a_rebuild_reads_is_complete(ledger: Ledger, database_url: str) -> None:
    # Gateways reserve under the old epoch while another opens the next one and reads: whatever was taken
    # is in what it read.
    writers = [Ledger(open_database(database_url)) for _ in range(2)]
    old = await ledger.next_epoch()
    taken: set[str] = set()
    some_taken = asyncio.Event()

    async def reserve_until_refused(writer: Ledger, name: str) -> None:
        for number in itertools.count():
            try:
                await writer.append(row(f"{name}-{number}"), epoch=old)
            except EpochEnded:
                return
            taken.add(f"{name}-{number}")
            some_taken.set()

    writing = [
        asyncio.create_task(reserve_until_refused(writer, f"{index}-{line}"))
        for index, writer in enumerate(writers)
        for line in range(10)
    ]
    await some_taken.wait()
    await ledger.next_epoch()
    read = {each.request_id for each in (await ledger.standing([], NOON)).open_requests}
    await asyncio.gather(*writing)
    assert read == taken
    for writer in writers:
        await writer._database.close()


async def test_the_next_epoch_waits_for_what_is_being_written(postgres_url: str) -> None:
    slow, quick = open_database(postgres_url), open_database(postgres_url)
    old = await Ledger(slow).next_epoch()
    entered, leave = threading.Event(), threading.Event()

    def half_way(connection: Connection) -> None:
        _append(connection, [_new_row(row("slow"), old)])
        entered.set()
        assert leave.wait(30)

    writing = asyncio.create_task(slow.write(half_way))
    await asyncio.to_thread(entered.wait, 30)
    opening = asyncio.create_task(Ledger(quick).next_epoch())
    waiting = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")

    async def somebody_waits() -> bool:
        return bool(await quick.read(lambda connection: connection.execute(waiting).scalar_one()))

    async with asyncio.timeout(20):
        while not await somebody_waits():  # another process: no event of ours tells
            assert not opening.done(), "it did not wait"
    leave.set()
    await writing
    await opening
    [found] = (await Ledger(quick).standing([], NOON)).open_requests
    assert found.request_id == "slow"
    await slow.close()
    await quick.close()


async def test_buckets_of_running_streams_are_rebuilt_empty(ledger: Ledger) -> None:
    bucket, other = limit(amount=100, rate_per_s=10), limit(Meter.OUTPUT_TOKENS, 50, rate_per_s=5)
    await ledger.append(row(charged_to=("tenant:ten_a:total_tokens:bucket:*",)))
    assert (await ledger.standing([bucket, other], NOON)).used == [(bucket, 0), (other, 0)]
    await ledger.append(row(kind="top_up", number=1))
    assert (await ledger.standing([bucket, other], NOON)).used == [(bucket, 100), (other, 0)]


async def test_many_requests_of_one_key_wait_for_no_common_row(postgres_url: str) -> None:
    # One gateway's transaction stays open in the middle; what another writes for the same key goes on.
    slow, quick = open_database(postgres_url), open_database(postgres_url)
    entered, leave = threading.Event(), threading.Event()
    epoch = await Ledger(slow).next_epoch()

    def half_way(connection: Connection) -> None:
        for kind in ("reserve", "settle"):
            charged_to = ("same",) if kind == "reserve" else ()
            slow_row = row("slow", cast(Kind, kind), gateway_id="gw_slow", charged_to=charged_to)
            _append(connection, [_new_row(slow_row, epoch)])
        entered.set()
        assert leave.wait(30)

    writing = asyncio.create_task(slow.write(half_way))
    await asyncio.to_thread(entered.wait, 30)
    ledger = Ledger(quick)
    async with asyncio.timeout(20):
        for index in range(50):
            assert await ledger.append(row(f"r{index}", charged_to=("same",)), epoch=epoch)
            assert await ledger.append(row(f"r{index}", "top_up", number=1), epoch=epoch)
            assert await ledger.append(row(f"r{index}", "settle"))
    assert not writing.done()
    leave.set()
    await writing
    await slow.close()
    await quick.close()


async def test_totals_are_charges_by_tenant_tier_and_model(ledger: Ledger) -> None:
    await ledger.append(row("r0", amounts=Amounts(100, 100, 100, 1)))
    await ledger.append(row("r0", "settle", Amounts(10, 5, 50, 1)))
    await ledger.append(row("r1", "settle", Amounts(1, 2, 3, 1), at=NOON + timedelta(hours=1)))
    await ledger.append(row("r2", "settle", Amounts(1, 1, 1, 1), tenant_id="ten_b", tier="batch"))
    await ledger.append(row("r1", "credit", Amounts(0, 0, -3, 0)))
    everything = await ledger.totals()
    assert [
        (each.tenant_id, each.tier, each.requests, each.input_tokens, each.cost_nanousd)
        for each in everything
    ] == [("ten_a", "standard", 2, 11, 50), ("ten_b", "batch", 1, 1, 1)]
    assert [
        each.output_tokens
        for each in await ledger.totals(tenant_id="ten_a", until=NOON + timedelta(seconds=1))
    ] == [5]
    assert [each.output_tokens for each in await ledger.totals(since=NOON + timedelta(seconds=1))] == [2]


async def test_counters_are_rebuilt_from_rows_alone(ledger: Ledger) -> None:
    # The same history through a live store and through the ledger; a new store must look like the old one.
    limits = [
        limit(amount=10_000, window=Window.MINUTE),
        limit(amount=10_000, window=Window.DAY, time_zone="Asia/Tokyo"),
        limit(Meter.OUTPUT_TOKENS, amount=100_000),
        limit(Meter.COST_NANOUSD, amount=10**12, window=Window.MONTH),
        limit(Meter.REQUESTS, amount=100, window=Window.HOUR, tier=Tier.BATCH),
        limit(Meter.INPUT_TOKENS, amount=5_000, kind=SubjectKind.KEY, subject_id="key_a"),
        limit(amount=2_000, rate_per_s=5),
        limit(Meter.CONCURRENCY, amount=9),
    ]
    clock = Clock()
    live = MemoryQuotaStore(clock)

    async def one(index: int, on: list[Limit], runs_s: float, used: Amounts) -> None:
        at = datetime.fromtimestamp(clock(), UTC)
        held = Amounts(used.input_tokens, 200, 10_000, 1)
        granted = await live.reserve(f"r{index}", on, Hold.whole(held), 3_600)
        assert isinstance(granted, Granted)
        await ledger.append(row(f"r{index}", "reserve", held, at=at, charged_to=granted.charged_to))
        clock.advance(runs_s)
        await ledger.append(row(f"r{index}", "settle", used, at=datetime.fromtimestamp(clock(), UTC)))
        await live.settle(f"r{index}", used)

    await one(0, limits, 30, Amounts(10, 100, 900, 1))
    await one(1, limits, 30, Amounts(20, 200, 800, 1))  # ends in the next minute
    await one(2, limits[:4], 5, Amounts(7, 70, 7_000, 1))
    await one(3, limits, 0, Amounts(5, 0, 50, 1))
    await one(4, limits, 20, Amounts(50, 1, 50, 1))
    used = (await ledger.standing(limits, datetime.fromtimestamp(clock(), UTC))).used
    assert [limit for limit, _ in used] == limits
    rebuilt = MemoryQuotaStore(clock)
    await rebuilt.rebuild(used)
    assert await rebuilt.states(limits) == await live.states(limits)
    minute = (await live.states(limits))[0]
    assert minute.used == 77 + 5 + 51  # requests 2, 3 and 4 were reserved in this minute


async def test_counters_of_end_users_and_of_the_platform_are_rebuilt_from_rows_alone(ledger: Ledger) -> None:
    def default(meter: Meter = Meter.TOTAL_TOKENS, **shape: Any) -> Limit:
        return limit(meter, 1_000, kind=SubjectKind.END_USER, subject_id="ten_a", **shape)

    defaults = [default(window=Window.MINUTE), default(rate_per_s=2), default(Meter.CONCURRENCY)]
    everyone, hers = on_platform(amount=10_000), on_user("amy", amount=500, window=Window.MINUTE)
    clock = Clock()
    live = MemoryQuotaStore(clock)

    async def one(request_id: str, user: str, runs_s: float, is_open: bool = False) -> None:
        own = [each.of_end_user(f"usr_{user}") for each in defaults]
        on = [hers if each.identity == hers.identity else each for each in [*own, everyone]]
        at = datetime.fromtimestamp(clock(), UTC)
        granted = await live.reserve(request_id, on, Hold.whole(Amounts(output_tokens=50)), 3_600)
        assert isinstance(granted, Granted)
        held = Amounts(output_tokens=50)
        await ledger.append(row(request_id, "reserve", held, at=at, charged_to=granted.charged_to))
        clock.advance(runs_s)
        if not is_open:
            used, at = Amounts(output_tokens=40), datetime.fromtimestamp(clock(), UTC)
            await ledger.append(row(request_id, "settle", used, at=at))
            await live.settle(request_id, used)

    await one("old", "old", 60)  # two minutes ago: nothing of it counts
    clock.advance(600)
    await one("a", "amy", 41)  # settled in the minute after its own
    await one("b", "bob", 1)
    await one("c", "amy", 1)
    await one("d", "dan", 1, is_open=True)
    standing = await ledger.standing([*defaults, everyone, hers], datetime.fromtimestamp(clock(), UTC))
    counted = [each for each, _ in standing.used]
    users = {each.subject_id for each in counted if each.kind is SubjectKind.END_USER}
    assert users == {"usr_amy", "usr_bob", "usr_dan"}
    assert [each for each in counted if each.identity == hers.identity] == [hers]
    rebuilt = MemoryQuotaStore(clock)
    await rebuilt.rebuild(standing.used)
    [opened] = standing.open_requests
    charged_to = opened.reserve.charged_to
    path = [each for each in counted if each.identity in map(rules.identity_in, charged_to)]
    await rebuilt.restore("d", path, charged_to, Hold.whole(opened.held), opened.used, 60)
    assert await rebuilt.states(counted) == await live.states(counted)
    used = {state.counter: state.used for state in await rebuilt.states(counted) if state.limit.window}
    assert sorted(used.values()) == [0, 40, 40, 160]


async def test_a_saturated_bucket_is_never_rebuilt_with_more_than_there_was(ledger: Ledger) -> None:
    bucket, clock = limit(amount=100, rate_per_s=10), Clock()
    live = MemoryQuotaStore(clock)
    for index in range(80):
        granted = await live.reserve(f"r{index}", [bucket], Hold.whole(Amounts(output_tokens=25)), 60)
        if isinstance(granted, Granted):
            at = datetime.fromtimestamp(clock(), UTC)
            used = Amounts(output_tokens=25)
            await ledger.append(row(f"r{index}", "reserve", used, at=at, charged_to=granted.charged_to))
            await ledger.append(row(f"r{index}", "settle", used, at=at))
            await live.settle(f"r{index}", used)
        clock.advance(0.5)
        [(_, rebuilt)] = (await ledger.standing([bucket], datetime.fromtimestamp(clock(), UTC))).used
        [state] = await live.states([bucket])
        assert state.used <= rebuilt <= 100
    clock.advance(11)
    assert (await ledger.standing([bucket], datetime.fromtimestamp(clock(), UTC))).used == [(bucket, 0)]


async def test_limits_without_history_have_used_nothing(ledger: Ledger) -> None:
    limits = [limit(), limit(amount=10, rate_per_s=1), limit(Meter.CONCURRENCY, amount=1)]
    assert (await ledger.standing(limits, NOON)).used == [(each, 0) for each in limits]


async def test_a_row_that_cannot_be_stored_names_its_field(ledger: Ledger) -> None:
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("kind", {"kind": "refund"}),
        ("request_id", {"request_id": ""}),
        ("request_id", {"request_id": "x" * 81}),
        ("model", {"model": "x" * 257}),
        ("at", {"at": datetime(2025, 1, 1)}),
        ("number", {"number": 1}),
        ("number", {"kind": "top_up"}),
        ("output_tokens", {"amounts": Amounts(output_tokens=-1)}),
        ("charged_to", {"charged_to": tuple(f"c{index}" for index in range(200))}),
        ("detail", {"detail": {f"k{index}": 1 for index in range(100)}}),
    )
    for field, changes in cases:
        with pytest.raises(Invalid) as caught:
            await ledger.append(replace(row(), **changes))
        assert caught.value.field == field, changes
