"""Are reservations and charges written once, kept for ever, and enough to rebuild every counter?"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tenants.database import Database, open_database
from tenants.errors import Invalid
from tenants.ledger import Kind, Ledger, LedgerRow
from tenants.quota.memory import MemoryQuotaStore
from tenants.quota.store import Granted
from tenants.types import Amounts, Limit, Meter, SubjectKind, Tier, Window
from tests.quota import NOON_S, Clock, limit

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
    assert [each.request_id for each in await ledger.open_reserves("gw_0")] == ["r2", "r4"]
    assert [each.request_id for each in await ledger.open_reserves()] == ["r1", "r2", "r4", "r5"]
    assert [each.request_id for each in await ledger.open_reserves(most=1)] == ["r1"]
    assert (await ledger.open_reserves("gw_0"))[0].charged_to == ("a",)


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
    ] == [
        ("ten_a", "standard", 2, 11, 50),
        ("ten_b", "batch", 1, 1, 1),
    ]
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
        granted = await live.reserve(f"r{index}", on, held, 3_600)
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
    used = await ledger.usage_by_limit(limits, datetime.fromtimestamp(clock(), UTC))
    assert [limit for limit, _ in used] == limits
    rebuilt = MemoryQuotaStore(clock)
    await rebuilt.rebuild(used)
    assert await rebuilt.states(limits) == await live.states(limits)
    minute = (await live.states(limits))[0]
    assert minute.used == 77 + 5 + 51  # requests 2, 3 and 4 were reserved in this minute


async def test_a_saturated_bucket_is_never_rebuilt_with_more_than_there_was(ledger: Ledger) -> None:
    bucket, clock = limit(amount=100, rate_per_s=10), Clock()
    live = MemoryQuotaStore(clock)
    for index in range(80):
        granted = await live.reserve(f"r{index}", [bucket], Amounts(output_tokens=25), 60)
        if isinstance(granted, Granted):
            at = datetime.fromtimestamp(clock(), UTC)
            used = Amounts(output_tokens=25)
            await ledger.append(row(f"r{index}", "reserve", used, at=at, charged_to=granted.charged_to))
            await ledger.append(row(f"r{index}", "settle", used, at=at))
            await live.settle(f"r{index}", used)
        clock.advance(0.5)
        [(_, rebuilt)] = await ledger.usage_by_limit([bucket], datetime.fromtimestamp(clock(), UTC))
        [state] = await live.states([bucket])
        assert state.used <= rebuilt <= 100
    clock.advance(11)
    assert await ledger.usage_by_limit([bucket], datetime.fromtimestamp(clock(), UTC)) == [(bucket, 0)]


async def test_limits_without_history_have_used_nothing(ledger: Ledger) -> None:
    limits = [limit(), limit(amount=10, rate_per_s=1), limit(Meter.CONCURRENCY, amount=1)]
    assert await ledger.usage_by_limit(limits, NOON) == [(each, 0) for each in limits]


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("kind", {"kind": "refund"}),
        ("request_id", {"request_id": ""}),
        ("request_id", {"request_id": "x" * 81}),
        ("model", {"model": "x" * 257}),
        ("at", {"at": datetime(2025, 1, 1)}),
        ("output_tokens", {"amounts": Amounts(output_tokens=-1)}),
        ("charged_to", {"charged_to": tuple(f"c{index}" for index in range(200))}),
        ("detail", {"detail": {f"k{index}": 1 for index in range(100)}}),
    ],
)
async def test_a_row_that_cannot_be_stored_names_its_field(
    ledger: Ledger, field: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(Invalid) as caught:
        await ledger.append(replace(row(), **changes))
    assert caught.value.field == field
