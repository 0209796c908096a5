"""What does every quota store promise? Run for the one in this process and for the one in Redis."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator

import pytest

from tenants.errors import Invalid
from tenants.quota.memory import MemoryQuotaStore
from tenants.quota.redis import RedisQuotaStore
from tenants.quota.store import Denied, Granted, Overrun, QuotaStore
from tenants.types import Amounts, Limit, Meter, Mode, SubjectKind, Tier, Window
from tests.quota import NOON_S, Clock, limit

LEASE_S = 30.0


def tokens(count: int) -> Amounts:
    return Amounts(output_tokens=count)


def more(count: int) -> Amounts:
    return Amounts(output_tokens=count, requests=0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, clock: Clock) -> AsyncIterator[QuotaStore]:
    if request.param == "memory":
        memory = MemoryQuotaStore(clock)
        yield memory
        memory.check()
    else:
        shared = RedisQuotaStore(request.getfixturevalue("redis_url"), timeout_s=30, virtual_clock=clock)
        yield shared
        await shared.close()


async def counts(store: QuotaStore, *limits: Limit) -> list[tuple[int, int, int]]:
    return [(state.used, state.held, state.available) for state in await store.states(limits)]


# ---------------------------------------------------------------- holding and settling


async def test_a_hold_becomes_a_charge_and_a_refund(store: QuotaStore) -> None:
    budget = limit(amount=100)
    granted = await store.reserve("r", [budget], tokens(60), LEASE_S)
    assert isinstance(granted, Granted)
    assert [(state.used, state.held, state.available) for state in granted.states] == [(0, 60, 40)]
    assert await store.settle("r", tokens(25))
    assert await counts(store, budget) == [(25, 0, 75)]


async def test_settling_twice_changes_nothing(store: QuotaStore) -> None:
    budget = limit(amount=100)
    await store.reserve("r", [budget], tokens(60), LEASE_S)
    assert await store.settle("r", tokens(25))
    assert not await store.settle("r", tokens(30))
    assert not await store.settle("never", tokens(30))
    assert await counts(store, budget) == [(25, 0, 75)]


async def test_reserving_twice_holds_once(store: QuotaStore) -> None:
    budget = limit(amount=100)
    first = await store.reserve("r", [budget], tokens(60), LEASE_S)
    second = await store.reserve("r", [budget], tokens(60), LEASE_S)
    assert first == second
    assert await counts(store, budget) == [(0, 60, 40)]


async def test_what_does_not_fit_one_limit_is_held_on_none(store: QuotaStore) -> None:
    wide = limit(amount=1_000)
    narrow = limit(amount=10, kind=SubjectKind.KEY, subject_id="key_a")
    denied = await store.reserve("r", [wide, narrow], tokens(11), LEASE_S)
    assert isinstance(denied, Denied)
    assert (denied.limit, denied.wanted, denied.available) == (narrow, 11, 10)
    assert await counts(store, wide, narrow) == [(0, 0, 1_000), (0, 0, 10)]
    assert not await store.settle("r", tokens(1))


async def test_exactly_the_amount_fits_and_one_more_does_not(store: QuotaStore) -> None:
    budget = limit(amount=100)
    assert isinstance(await store.reserve("a", [budget], tokens(99), LEASE_S), Granted)
    assert isinstance(await store.reserve("b", [budget], tokens(2), LEASE_S), Denied)
    assert isinstance(await store.reserve("c", [budget], tokens(1), LEASE_S), Granted)
    assert await counts(store, budget) == [(0, 100, 0)]


async def test_each_meter_counts_its_own(store: QuotaStore) -> None:
    limits = [limit(meter, amount=1_000) for meter in Meter]
    await store.reserve("r", limits, Amounts(30, 200, 999, 1), LEASE_S)
    held = {state.limit.meter: state.held for state in await store.states(limits)}
    assert held == {
        Meter.TOTAL_TOKENS: 230,
        Meter.INPUT_TOKENS: 30,
        Meter.OUTPUT_TOKENS: 200,
        Meter.COST_NANOUSD: 999,
        Meter.REQUESTS: 1,
        Meter.CONCURRENCY: 1,
    }
    await store.settle("r", Amounts(30, 20, 500, 1))
    used = {state.limit.meter: (state.used, state.held) for state in await store.states(limits)}
    assert used == {
        Meter.TOTAL_TOKENS: (50, 0),
        Meter.INPUT_TOKENS: (30, 0),
        Meter.OUTPUT_TOKENS: (20, 0),
        Meter.COST_NANOUSD: (500, 0),
        Meter.REQUESTS: (1, 0),
        Meter.CONCURRENCY: (0, 0),
    }


async def test_more_than_was_held_is_never_charged_to_a_hard_limit(store: QuotaStore) -> None:
    budget = limit(amount=100)
    await store.reserve("r", [budget], tokens(60), LEASE_S)
    with pytest.raises(Overrun):
        await store.settle("r", tokens(61))
    assert await counts(store, budget) == [(0, 60, 40)]
    assert await store.settle("r", tokens(60))


async def test_a_request_without_limits_is_held_and_settled_once(store: QuotaStore) -> None:
    assert isinstance(await store.reserve("r", [], tokens(60), LEASE_S), Granted)
    assert await store.settle("r", tokens(60))
    assert not await store.settle("r", tokens(60))


async def test_large_amounts_are_exact(store: QuotaStore) -> None:
    budget = limit(Meter.COST_NANOUSD, amount=9_000_000_000_000_000)
    held = 2_250_000_000_000_000
    for index in range(3):
        await store.reserve(f"r{index}", [budget], Amounts(cost_nanousd=held - 1), LEASE_S)
    await store.settle("r0", Amounts(cost_nanousd=2_249_999_999_999_997))
    assert await counts(store, budget) == [(2_249_999_999_999_997, 2 * (held - 1), 2_250_000_000_000_005)]


# ---------------------------------------------------------------- windows


async def test_a_window_starts_empty_and_says_when(store: QuotaStore, clock: Clock) -> None:
    budget = limit(amount=100, window=Window.MINUTE)
    await store.reserve("r", [budget], tokens(100), LEASE_S)
    await store.settle("r", tokens(100))
    denied = await store.reserve("s", [budget], tokens(1), LEASE_S)
    assert isinstance(denied, Denied)
    assert denied.retry_after_s == 40.0
    clock.advance(39.999)
    assert isinstance(await store.reserve("s", [budget], tokens(1), LEASE_S), Denied)
    clock.advance(0.001)
    assert isinstance(await store.reserve("s", [budget], tokens(100), LEASE_S), Granted)


async def test_a_request_is_charged_to_the_window_it_was_reserved_in(store: QuotaStore, clock: Clock) -> None:
    budget = limit(amount=100, window=Window.MINUTE)
    before = await store.reserve("long", [budget], tokens(80), 1_000)
    clock.advance(60)
    after = await store.reserve("next", [budget], tokens(100), 1_000)
    assert isinstance(before, Granted)
    assert isinstance(after, Granted)
    assert before.charged_to != after.charged_to
    assert await store.settle("long", tokens(80))
    assert await counts(store, budget) == [(0, 100, 0)]
    assert await store.settle("next", tokens(70))
    assert await counts(store, budget) == [(70, 0, 30)]


async def test_a_request_that_outlives_its_window_still_charges_it_while_nobody_reserves(
    store: QuotaStore, clock: Clock
) -> None:
    budget = limit(amount=100, window=Window.MINUTE)
    await store.reserve("long", [budget], tokens(80), 1_000)
    clock.advance(60)
    assert await counts(store, budget) == [(0, 0, 100)]
    assert await store.settle("long", tokens(80))
    assert await counts(store, budget) == [(0, 0, 100)]


async def test_a_day_follows_the_time_zone(store: QuotaStore, clock: Clock) -> None:
    # 12:00:20 UTC is 21:00:20 in Tokyo: 2 h 59 min 40 s are left of the day there.
    tokyo = limit(amount=10, window=Window.DAY, time_zone="Asia/Tokyo")
    [state] = await store.states([tokyo])
    assert state.reset_s == 3 * 3600 - 20
    await store.reserve("r", [tokyo], tokens(10), LEASE_S)
    clock.advance(state.reset_s)
    assert await counts(store, tokyo) == [(0, 0, 10)]


async def test_a_lifetime_budget_never_comes_back(store: QuotaStore, clock: Clock) -> None:
    budget = limit(amount=10)
    await store.reserve("r", [budget], tokens(10), LEASE_S)
    await store.settle("r", tokens(10))
    clock.advance(400 * 86_400)
    denied = await store.reserve("s", [budget], tokens(1), LEASE_S)
    assert isinstance(denied, Denied)
    assert denied.retry_after_s is None
    assert denied.states[0].reset_s == math.inf


async def test_what_only_holds_stand_in_the_way_of_may_be_retried_soon(store: QuotaStore) -> None:
    budget = limit(amount=10)
    await store.reserve("r", [budget], tokens(10), LEASE_S)
    denied = await store.reserve("s", [budget], tokens(10), LEASE_S)
    assert isinstance(denied, Denied)
    assert denied.retry_after_s == 1.0


@pytest.mark.parametrize(
    "budget",
    [
        limit(amount=10, window=Window.MINUTE),
        limit(amount=10, rate_per_s=5),
        limit(Meter.CONCURRENCY, amount=0),
    ],
    ids=["window", "bucket", "concurrency"],
)
async def test_a_request_larger_than_its_limit_is_never_told_to_wait(
    store: QuotaStore, budget: Limit
) -> None:
    denied = await store.reserve("r", [budget], tokens(11), LEASE_S)
    assert isinstance(denied, Denied)
    assert denied.retry_after_s is None


async def test_the_refusal_names_the_limit_that_stands_in_the_way_longest(store: QuotaStore) -> None:
    minute = limit(amount=10, window=Window.MINUTE)
    day = limit(amount=10, window=Window.DAY)
    bucket = limit(amount=10, rate_per_s=1)
    await store.reserve("r", [minute, day, bucket], tokens(10), LEASE_S)
    await store.settle("r", tokens(10))
    denied = await store.reserve("s", [minute, day, bucket], tokens(5), LEASE_S)
    assert isinstance(denied, Denied)
    assert denied.limit == day
    assert [state.available for state in denied.states] == [0, 0, 0]


# ---------------------------------------------------------------- buckets


async def test_a_bucket_refills_at_its_rate_up_to_its_burst(store: QuotaStore, clock: Clock) -> None:
    bucket = limit(amount=100, rate_per_s=10)
    await store.reserve("r", [bucket], tokens(100), LEASE_S)
    await store.settle("r", tokens(100))
    denied = await store.reserve("s", [bucket], tokens(30), LEASE_S)
    assert isinstance(denied, Denied)
    assert denied.retry_after_s == 3.0
    clock.advance(2.999)
    assert isinstance(await store.reserve("s", [bucket], tokens(30), LEASE_S), Denied)
    clock.advance(0.001)
    assert isinstance(await store.reserve("s", [bucket], tokens(30), LEASE_S), Granted)
    await store.settle("s", tokens(0))
    clock.advance(1_000)
    assert await counts(store, bucket) == [(0, 0, 100)]


async def test_refilling_in_many_small_steps_loses_nothing(store: QuotaStore, clock: Clock) -> None:
    bucket = limit(amount=1_000_000, rate_per_s=0.7)
    await store.reserve("r", [bucket], tokens(1_000_000), 80_000)
    await store.settle("r", tokens(1_000_000))
    for step in range(200):
        clock.now_s = NOON_S + step * 0.05
        assert isinstance(await store.reserve(f"s{step}", [bucket], tokens(0), LEASE_S), Granted)
        await store.settle(f"s{step}", tokens(0))
    clock.now_s = NOON_S + 1_000
    assert await counts(store, bucket) == [(1_000_000 - 700, 0, 700)]


async def test_nested_holds_cannot_squeeze_more_than_burst_and_rate_out_of_a_bucket(
    store: QuotaStore, clock: Clock
) -> None:
    # Holding before a refill and giving back after it must not add the two up.
    bucket = limit(amount=100, rate_per_s=10)
    await store.reserve("first", [bucket], tokens(100), 1_000)
    clock.advance(10)
    assert isinstance(await store.reserve("second", [bucket], tokens(1), 1_000), Denied)
    await store.settle("first", tokens(0))
    assert isinstance(await store.reserve("second", [bucket], tokens(100), 1_000), Granted)
    assert isinstance(await store.reserve("third", [bucket], tokens(1), 1_000), Denied)


async def test_used_held_and_available_of_a_bucket_add_up_to_its_burst(
    store: QuotaStore, clock: Clock
) -> None:
    bucket = limit(amount=100, rate_per_s=3)
    await store.reserve("a", [bucket], tokens(50), LEASE_S)
    await store.settle("a", tokens(33))
    await store.reserve("b", [bucket], tokens(20), LEASE_S)
    for _ in range(5):
        clock.advance(1.7)
        [state] = await store.states([bucket])
        assert state.used + state.held + state.available == 100


# ---------------------------------------------------------------- concurrency, soft, shadow, changes


async def test_concurrency_counts_what_runs(store: QuotaStore) -> None:
    two = limit(Meter.CONCURRENCY, amount=2)
    assert isinstance(await store.reserve("a", [two], tokens(1), LEASE_S), Granted)
    assert isinstance(await store.reserve("b", [two], tokens(1), LEASE_S), Granted)
    denied = await store.reserve("c", [two], tokens(1), LEASE_S)
    assert isinstance(denied, Denied)
    assert denied.retry_after_s == 1.0
    await store.settle("a", tokens(1))
    assert isinstance(await store.reserve("c", [two], tokens(1), LEASE_S), Granted)


@pytest.mark.parametrize("mode", [Mode.SOFT, Mode.SHADOW])
async def test_soft_and_shadow_limits_count_but_never_refuse(store: QuotaStore, mode: Mode) -> None:
    watched = limit(amount=10, mode=mode)
    first = await store.reserve("a", [watched], tokens(10), LEASE_S)
    second = await store.reserve("b", [watched], tokens(10), LEASE_S)
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    assert (first.exceeded, second.exceeded) == ((), (watched,))
    await store.settle("a", tokens(10))
    await store.settle("b", tokens(15))  # more than was held: nothing is at stake
    assert await counts(store, watched) == [(25, 0, 0)]


async def test_changing_the_amount_keeps_what_was_used(store: QuotaStore) -> None:
    small = limit(amount=10)
    await store.reserve("a", [small], tokens(10), LEASE_S)
    await store.settle("a", tokens(8))
    large = dataclasses.replace(small, amount=20, limit_id="lim_other")
    assert await counts(store, large) == [(8, 0, 12)]
    tiny = dataclasses.replace(small, amount=5)
    assert await counts(store, tiny) == [(8, 0, 0)]
    assert isinstance(await store.reserve("b", [tiny], tokens(0), LEASE_S), Granted)
    assert isinstance(await store.reserve("c", [tiny], tokens(1), LEASE_S), Denied)


async def test_tiers_and_subjects_have_budgets_of_their_own(store: QuotaStore) -> None:
    limits = [
        limit(amount=10),
        limit(amount=10, tier=Tier.BATCH),
        limit(amount=10, kind=SubjectKind.KEY, subject_id="key_a"),
        limit(amount=10, kind=SubjectKind.KEY, subject_id="key_b"),
        limit(amount=10, tenant_id="ten_b"),
    ]
    await store.reserve("r", [limits[1], limits[2]], tokens(4), LEASE_S)
    assert [state.held for state in await store.states(limits)] == [0, 4, 4, 0, 0]


# ---------------------------------------------------------------- top-ups


async def test_a_top_up_adds_to_the_hold_or_changes_nothing(store: QuotaStore) -> None:
    budget, requests = limit(amount=100), limit(Meter.REQUESTS, amount=1)
    await store.reserve("r", [budget, requests], tokens(40), LEASE_S)
    assert isinstance(await store.top_up("r", more(60)), Granted)
    denied = await store.top_up("r", more(1))
    assert isinstance(denied, Denied)
    assert (denied.limit, denied.wanted, denied.available) == (budget, 1, 0)
    assert await counts(store, budget, requests) == [(0, 100, 0), (0, 1, 0)]
    assert await store.settle("r", tokens(100))
    assert await counts(store, budget, requests) == [(100, 0, 0), (1, 0, 0)]
    with pytest.raises(KeyError):
        await store.top_up("r", more(1))


async def test_a_top_up_is_held_on_the_window_of_the_request_also_after_its_end(
    store: QuotaStore, clock: Clock
) -> None:
    minute, lifetime = limit(amount=100, window=Window.MINUTE), limit(amount=500)
    await store.reserve("r", [minute, lifetime], tokens(70), 1_000)
    await store.reserve("done", [minute, lifetime], tokens(10), 1_000)
    await store.settle("done", tokens(10))
    clock.advance(60)
    await store.reserve("s", [minute, lifetime], tokens(90), 1_000)
    denied = await store.top_up("r", more(21))
    assert isinstance(denied, Denied)
    assert (denied.limit, denied.available, denied.retry_after_s) == (minute, 20, None)
    assert [(state.used, state.held) for state in denied.states] == [(0, 90), (10, 160)]
    assert isinstance(await store.top_up("r", more(20)), Granted)
    assert isinstance(await store.top_up("r", more(1)), Denied)
    assert await counts(store, minute, lifetime) == [(0, 90, 10), (10, 180, 310)]
    assert await store.settle("r", tokens(90))
    assert await counts(store, minute, lifetime) == [(0, 90, 10), (100, 90, 310)]


async def test_a_window_that_is_over_and_forgotten_has_no_room_for_top_ups(
    store: QuotaStore, clock: Clock
) -> None:
    minute = limit(amount=100, window=Window.MINUTE)
    await store.reserve("r", [minute], tokens(0), 1_000)
    clock.advance(60)
    await store.reserve("s", [minute], tokens(5), 1_000)
    assert isinstance(await store.top_up("r", more(1)), Denied)
    assert await store.settle("r", tokens(0))
    assert await counts(store, minute) == [(0, 5, 95)]


# ---------------------------------------------------------------- leases


async def test_a_lease_that_runs_out_gives_everything_back(store: QuotaStore, clock: Clock) -> None:
    budget, one = limit(amount=100), limit(Meter.CONCURRENCY, amount=1)
    await store.reserve("r", [budget, one], tokens(60), 30)
    clock.advance(29.9)
    assert await store.expire() == []
    clock.advance(0.1)
    assert await store.expire() == ["r"]
    assert await store.expire() == []
    assert await counts(store, budget, one) == [(0, 0, 100), (0, 0, 1)]
    assert not await store.settle("r", tokens(5))


async def test_renewing_keeps_a_hold_and_never_revives_or_shortens_one(
    store: QuotaStore, clock: Clock
) -> None:
    budget = limit(amount=100)
    await store.reserve("a", [budget], tokens(60), 30)
    clock.advance(20)
    await store.renew(["a", "unknown"], 30)
    await store.renew(["a"], 1)
    clock.advance(29)
    assert await store.expire() == []
    clock.advance(1)
    assert await store.expire() == ["a"]
    await store.renew(["a"], 30)
    assert await counts(store, budget) == [(0, 0, 100)]


async def test_many_leases_of_many_tenants_expire_together(store: QuotaStore, clock: Clock) -> None:
    limits = {
        tenant_id: limit(amount=10_000, tenant_id=tenant_id) for tenant_id in ("ten_a", "ten_b", "ten_c")
    }
    for index in range(300):
        tenant_id = f"ten_{'abc'[index % 3]}"
        await store.reserve(f"r{index}", [limits[tenant_id]], tokens(1), 5)
    clock.advance(5)
    assert sorted(await store.expire()) == sorted(f"r{index}" for index in range(300))
    assert await counts(store, *limits.values()) == [(0, 0, 10_000)] * 3


# ---------------------------------------------------------------- concurrency, rebuilding, the door


async def test_fifty_at_once_never_exceed_a_hard_limit(store: QuotaStore) -> None:
    budget = limit(amount=1_000)
    bucket = limit(amount=950, rate_per_s=0.001)

    async def one(index: int) -> int:
        answer = await store.reserve(f"r{index}", [budget, bucket], tokens(37), LEASE_S)
        if isinstance(answer, Denied):
            return 0
        for state in answer.states:
            assert state.used + state.held <= state.limit.amount
        await asyncio.sleep(0)
        assert await store.settle(f"r{index}", tokens(37))
        assert not await store.settle(f"r{index}", tokens(37))
        return 37

    spent = sum(await asyncio.gather(*(one(index) for index in range(50))))
    assert spent == 950 // 37 * 37
    assert await counts(store, budget, bucket) == [(spent, 0, 1_000 - spent), (spent, 0, 950 - spent)]


async def test_rebuilding_sets_what_was_used_and_keeps_what_is_held(store: QuotaStore) -> None:
    window, bucket = limit(amount=100, window=Window.HOUR), limit(amount=100, rate_per_s=0.001)
    one = limit(Meter.CONCURRENCY, amount=5)
    await store.reserve("r", [window, bucket, one], tokens(10), LEASE_S)
    await store.rebuild([(window, 70), (bucket, 60), (one, 0)])
    assert await counts(store, window, bucket, one) == [(70, 10, 20), (60, 10, 30), (0, 1, 4)]
    await store.settle("r", tokens(5))
    assert await counts(store, window, bucket, one) == [(75, 0, 25), (65, 0, 35), (0, 0, 5)]


@pytest.mark.parametrize(
    ("field", "request_id", "limits", "amounts", "lease_s"),
    [
        ("output_tokens", "r", [limit()], Amounts(output_tokens=-1), 30.0),
        ("cost_nanousd", "r", [limit()], Amounts(cost_nanousd=10**16), 30.0),
        ("input_tokens", "r", [limit()], Amounts(input_tokens=1.5), 30.0),  # type: ignore[arg-type]
        ("request_id", "", [limit()], Amounts(), 30.0),
        ("request_id", "x" * 81, [limit()], Amounts(), 30.0),
        ("lease_ttl_s", "r", [limit()], Amounts(), 0.0),
        ("limits", "r", [limit(), limit()], Amounts(), 30.0),
        ("limits", "r", [limit(), limit(tenant_id="ten_b")], Amounts(), 30.0),
        ("limits", "r", [limit(subject_id=f"key_{n}") for n in range(129)], Amounts(), 30.0),
        ("amount", "r", [limit(amount=10**16)], Amounts(), 30.0),
        ("amount", "r", [limit(amount=10**10, rate_per_s=1)], Amounts(), 30.0),
        ("rate_per_s", "r", [limit(amount=10, rate_per_s=0.0001)], Amounts(), 30.0),
    ],
)
async def test_what_cannot_be_counted_exactly_is_refused_at_the_door(
    store: QuotaStore, field: str, request_id: str, limits: list[Limit], amounts: Amounts, lease_s: float
) -> None:
    with pytest.raises(Invalid) as caught:
        await store.reserve(request_id, limits, amounts, lease_s)
    assert caught.value.field == field


async def test_a_store_that_is_there_answers_a_ping(store: QuotaStore) -> None:
    await store.ping()
