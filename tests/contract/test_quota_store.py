"""Contract of every quota store. Run for the one in this process, for the one in Redis (one server, and a
cluster), and for the one that can fall back from it, which passes all through as long as Redis answers."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tenants.errors import Invalid
from tenants.quota import rules
from tenants.quota.fallback import FallbackQuotaStore
from tenants.quota.memory import MemoryQuotaStore
from tenants.quota.redis import RedisQuotaStore
from tenants.quota.store import (
    Denied,
    Granted,
    Hold,
    Overrun,
    QuotaStore,
    QuotaStoreRecovering,
    TooManyEndUsers,
)
from tenants.types import Amounts, Limit, LimitMode, Meter, SubjectKind, Tier, Window
from tests.support import services
from tests.support.quota import NOON_S, Clock, filled, limit, on_platform, on_user, stepwise, whole

LEASE_S = 30.0
MOST_USERS = 3
CLUSTERS = "redis_cluster", "valkey_cluster"
STORES = ["memory", "redis", "fallback", *(pytest.param(each, marks=pytest.mark.long) for each in CLUSTERS)]


def tokens(count: int) -> Amounts:
    return Amounts(output_tokens=count)


def redis_store(request: pytest.FixtureRequest, clock: Clock) -> RedisQuotaStore:
    if request.param in CLUSTERS:
        url = request.getfixturevalue(request.param).url
        services.delete_keys(url)
    else:
        url = request.getfixturevalue("redis_url")
    return RedisQuotaStore(url, timeout_s=30, virtual_clock=clock, max_end_users=MOST_USERS)


@pytest.fixture(params=STORES)
async def store(request: pytest.FixtureRequest, clock: Clock) -> AsyncIterator[QuotaStore]:
    if request.param == "memory":
        memory = MemoryQuotaStore(clock, max_end_users=MOST_USERS)
        await filled(memory)
        yield memory
        memory.check()
    else:
        shared = redis_store(request, clock)
        used: QuotaStore = FallbackQuotaStore(shared, 10, clock) if request.param == "fallback" else shared
        await filled(used)
        yield used
        assert not used.is_local
        await shared.close()


async def raised(store: QuotaStore, request_id: str, total: int, *, used: int = 0) -> Granted | Denied:
    """A top-up to so many output tokens, all of them needed."""
    return await store.top_up(request_id, tokens(used), tokens(total), tokens(total))


async def counts(store: QuotaStore, *limits: Limit) -> list[tuple[int, int, int]]:
    return [(state.used, state.held, state.available) for state in await store.states(limits)]


# ---------------------------------------------------------------- holding and settling


async def test_a_bucket_refills_by_spare_capacity_and_keeps_what_it_has(
    store: QuotaStore, clock: Clock
) -> None:
    bucket = limit(amount=100, rate_per_s=1, ceiling_per_s=9, tier=Tier.BATCH, model="one")
    await store.reserve("r", [bucket], whole(100), LEASE_S)
    await store.settle("r", tokens(100))
    clock.advance(2)
    store.spare.set("one", 0.5)
    clock.advance(4)
    denied = await store.reserve("s", [bucket], whole(32), LEASE_S)
    assert isinstance(denied, Denied)
    assert (denied.available, denied.retry_after_s) == (2 * 1 + 4 * 5, 2.0)
    assert [(each.refill_per_s, each.reset_s) for each in denied.states] == [(5.0, 15.6)]
    granted = await store.reserve("s", [bucket], whole(20), LEASE_S)
    assert isinstance(granted, Granted)
    store.spare.set("one", 0.0)
    assert await counts(store, bucket) == [(78, 20, 2)], "what it has and what is held stays"
    clock.advance(1)
    again = await raised(store, "s", 24, used=20)
    assert isinstance(again, Denied)
    assert (again.available, again.retry_after_s) == (3, 1.0)
    clock.advance(1)
    assert isinstance(await raised(store, "s", 24, used=20), Granted)


async def test_a_running_request_comes_under_a_ceiling_and_loses_it_again(
    store: QuotaStore, clock: Clock
) -> None:
    plain = limit(amount=100, rate_per_s=1, tier=Tier.BATCH)
    higher = dataclasses.replace(plain, ceiling_per_s=9)
    store.spare.set("one", 1.0)
    await store.reserve("r", [plain], whole(100), LEASE_S)
    await store.top_up("r", tokens(90), tokens(100), tokens(100))
    clock.advance(2)
    hold = whole(100)
    assert isinstance(await store.rebind("r", [higher], hold, tokens(90), must_fit=False), Granted)
    assert await counts(store, higher) == [(72, 10, 18)], "as another rate, it counts for the time since"
    clock.advance(2)
    await store.settle("r", tokens(100))
    assert await counts(store, higher) == [(64, 0, 36)]
    clock.advance(2)
    assert await counts(store, plain) == [(62, 0, 38)]


async def test_a_hold_becomes_a_charge_and_a_refund(store: QuotaStore) -> None:
    budget = limit(amount=100)
    granted = await store.reserve("r", [budget], whole(60), LEASE_S)
    assert isinstance(granted, Granted)
    assert [(state.used, state.held, state.available) for state in granted.states] == [(0, 60, 40)]
    assert await store.settle("r", tokens(25))
    assert await counts(store, budget) == [(25, 0, 75)]


async def test_what_is_given_back_is_free_again_in_its_own_window_and_epoch(
    store: QuotaStore, clock: Clock
) -> None:
    budget = limit(amount=100)
    hourly = limit(amount=100, window=Window.HOUR)
    granted = await store.reserve("r", [budget, hourly], whole(60), LEASE_S)
    assert isinstance(granted, Granted)
    await store.settle("r", tokens(60))
    await store.give_back("of an earlier rebuild" if store.epoch else "", [budget], (), tokens(60))
    assert await counts(store, budget, hourly) == [(60, 0, 40)] * 2
    await store.give_back(store.epoch, [budget, hourly], granted.charged_to, tokens(25))
    assert await counts(store, budget, hourly) == [(35, 0, 65)] * 2
    clock.advance(3_600)
    await store.reserve("s", [budget, hourly], whole(50), LEASE_S)
    await store.settle("s", tokens(50))
    # The hour of the first request is over: its successor keeps what it was charged.
    await store.give_back(store.epoch, [budget, hourly], granted.charged_to, tokens(30))
    assert await counts(store, budget, hourly) == [(55, 0, 45), (50, 0, 50)]
    if store.epoch:
        await store.give_back("of an earlier rebuild", [budget], granted.charged_to, tokens(5))
        assert await counts(store, budget) == [(55, 0, 45)], "its counters were filled from the ledger"


async def test_settling_twice_changes_nothing(store: QuotaStore) -> None:
    budget = limit(amount=100)
    await store.reserve("r", [budget], whole(60), LEASE_S)
    assert await store.settle("r", tokens(25))
    assert not await store.settle("r", tokens(30))
    assert not await store.settle("never", tokens(30))
    assert await counts(store, budget) == [(25, 0, 75)]


async def test_reserving_twice_holds_once(store: QuotaStore) -> None:
    budget = limit(amount=100)
    first = await store.reserve("r", [budget], whole(60), LEASE_S)
    second = await store.reserve("r", [budget], whole(60), LEASE_S)
    assert first == second
    assert await counts(store, budget) == [(0, 60, 40)]


async def test_what_does_not_fit_one_limit_is_held_on_none(store: QuotaStore) -> None:
    wide = limit(amount=1_000)
    narrow = limit(amount=10, kind=SubjectKind.KEY, subject_id="key_a")
    denied = await store.reserve("r", [wide, narrow], whole(11), LEASE_S)
    assert isinstance(denied, Denied)
    assert (denied.limit, denied.wanted, denied.available) == (narrow, 11, 10)
    assert await counts(store, wide, narrow) == [(0, 0, 1_000), (0, 0, 10)]
    assert not await store.settle("r", tokens(1))


async def test_exactly_the_amount_fits_and_one_more_does_not(store: QuotaStore) -> None:
    budget = limit(amount=100)
    assert isinstance(await store.reserve("a", [budget], whole(99), LEASE_S), Granted)
    assert isinstance(await store.reserve("b", [budget], whole(2), LEASE_S), Denied)
    assert isinstance(await store.reserve("c", [budget], whole(1), LEASE_S), Granted)
    assert await counts(store, budget) == [(0, 100, 0)]


async def test_each_meter_counts_its_own(store: QuotaStore) -> None:
    limits = [limit(meter, amount=1_000) for meter in Meter]
    await store.reserve("r", limits, Hold.whole(Amounts(30, 200, 999, 1, 70)), LEASE_S)
    held = {state.limit.meter: state.held for state in await store.states(limits)}
    assert held == {
        Meter.TOTAL_TOKENS: 230,
        Meter.INPUT_TOKENS: 30,
        Meter.OUTPUT_TOKENS: 200,
        Meter.COST_NANOUSD: 999,
        Meter.REQUESTS: 1,
        Meter.GPU_MS: 70,
        Meter.CONCURRENCY: 1,
    }
    await store.settle("r", Amounts(30, 20, 500, 1, 80))
    used = {state.limit.meter: (state.used, state.held) for state in await store.states(limits)}
    assert used == {
        Meter.TOTAL_TOKENS: (50, 0),
        Meter.INPUT_TOKENS: (30, 0),
        Meter.OUTPUT_TOKENS: (20, 0),
        Meter.COST_NANOUSD: (500, 0),
        Meter.REQUESTS: (1, 0),
        Meter.GPU_MS: (80, 0),
        Meter.CONCURRENCY: (0, 0),
    }


async def test_more_than_was_held_is_never_charged_to_a_hard_limit(store: QuotaStore) -> None:
    budget = limit(amount=100)
    await store.reserve("r", [budget], whole(60), LEASE_S)
    with pytest.raises(Overrun):
        await store.settle("r", tokens(61))
    assert await counts(store, budget) == [(0, 60, 40)]
    assert await store.settle("r", tokens(60))


async def test_a_request_without_limits_is_held_and_settled_once(store: QuotaStore) -> None:
    assert isinstance(await store.reserve("r", [], whole(60), LEASE_S), Granted)
    assert await store.settle("r", tokens(60))
    assert not await store.settle("r", tokens(60))


async def test_large_amounts_are_exact(store: QuotaStore) -> None:
    budget = limit(Meter.COST_NANOUSD, amount=9_000_000_000_000_000)
    held = 2_250_000_000_000_000
    for index in range(3):
        await store.reserve(f"r{index}", [budget], Hold.whole(Amounts(cost_nanousd=held - 1)), LEASE_S)
    await store.settle("r0", Amounts(cost_nanousd=2_249_999_999_999_997))
    assert await counts(store, budget) == [(2_249_999_999_999_997, 2 * (held - 1), 2_250_000_000_000_005)]


# ---------------------------------------------------------------- windows


async def test_a_window_starts_empty_and_says_when(store: QuotaStore, clock: Clock) -> None:
    budget = limit(amount=100, window=Window.MINUTE)
    await store.reserve("r", [budget], whole(100), LEASE_S)
    await store.settle("r", tokens(100))
    denied = await store.reserve("s", [budget], whole(1), LEASE_S)
    assert isinstance(denied, Denied)
    assert denied.retry_after_s == 40.0
    clock.advance(39.999)
    assert isinstance(await store.reserve("s", [budget], whole(1), LEASE_S), Denied)
    clock.advance(0.001)
    assert isinstance(await store.reserve("s", [budget], whole(100), LEASE_S), Granted)


async def test_a_request_is_charged_to_the_window_it_was_reserved_in(store: QuotaStore, clock: Clock) -> None:
    budget = limit(amount=100, window=Window.MINUTE)
    before = await store.reserve("long", [budget], whole(80), 1_000)
    clock.advance(60)
    after = await store.reserve("next", [budget], whole(100), 1_000)
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
    await store.reserve("long", [budget], whole(80), 1_000)
    clock.advance(60)
    assert await counts(store, budget) == [(0, 0, 100)]
    assert await store.settle("long", tokens(80))
    assert await counts(store, budget) == [(0, 0, 100)]


async def test_a_day_follows_the_time_zone(store: QuotaStore, clock: Clock) -> None:
    # 12:00:20 UTC is 21:00:20 in Tokyo: 2 h 59 min 40 s are left of the day there.
    tokyo = limit(amount=10, window=Window.DAY, time_zone="Asia/Tokyo")
    [state] = await store.states([tokyo])
    assert state.reset_s == 3 * 3600 - 20
    await store.reserve("r", [tokyo], whole(10), LEASE_S)
    clock.advance(state.reset_s)
    assert await counts(store, tokyo) == [(0, 0, 10)]


async def test_a_lifetime_budget_never_comes_back(store: QuotaStore, clock: Clock) -> None:
    budget = limit(amount=10)
    await store.reserve("r", [budget], whole(10), LEASE_S)
    await store.settle("r", tokens(10))
    clock.advance(400 * 86_400)
    denied = await store.reserve("s", [budget], whole(1), LEASE_S)
    assert isinstance(denied, Denied)
    assert denied.retry_after_s is None
    assert denied.states[0].reset_s == math.inf


async def test_what_only_holds_stand_in_the_way_of_may_be_retried_soon(store: QuotaStore) -> None:
    budget = limit(amount=10)
    await store.reserve("r", [budget], whole(10), LEASE_S)
    denied = await store.reserve("s", [budget], whole(10), LEASE_S)
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
    denied = await store.reserve("r", [budget], whole(11), LEASE_S)
    assert isinstance(denied, Denied)
    assert denied.retry_after_s is None


async def test_the_refusal_names_the_limit_that_stands_in_the_way_longest(store: QuotaStore) -> None:
    minute = limit(amount=10, window=Window.MINUTE)
    day = limit(amount=10, window=Window.DAY)
    bucket = limit(amount=10, rate_per_s=1)
    await store.reserve("r", [minute, day, bucket], whole(10), LEASE_S)
    await store.settle("r", tokens(10))
    denied = await store.reserve("s", [minute, day, bucket], whole(5), LEASE_S)
    assert isinstance(denied, Denied)
    assert denied.limit == day
    assert [state.available for state in denied.states] == [0, 0, 0]


# ---------------------------------------------------------------- buckets


async def test_a_bucket_refills_at_its_rate_up_to_its_burst(store: QuotaStore, clock: Clock) -> None:
    bucket = limit(amount=100, rate_per_s=10)
    await store.reserve("r", [bucket], whole(100), LEASE_S)
    await store.settle("r", tokens(100))
    denied = await store.reserve("s", [bucket], whole(30), LEASE_S)
    assert isinstance(denied, Denied)
    assert denied.retry_after_s == 3.0
    clock.advance(2.999)
    assert isinstance(await store.reserve("s", [bucket], whole(30), LEASE_S), Denied)
    clock.advance(0.001)
    assert isinstance(await store.reserve("s", [bucket], whole(30), LEASE_S), Granted)
    await store.settle("s", tokens(0))
    clock.advance(1_000)
    assert await counts(store, bucket) == [(0, 0, 100)]


async def test_refilling_in_many_small_steps_loses_nothing(store: QuotaStore, clock: Clock) -> None:
    bucket = limit(amount=1_000_000, rate_per_s=0.7)
    await store.reserve("r", [bucket], whole(1_000_000), 80_000)
    await store.settle("r", tokens(1_000_000))
    for step in range(200):
        clock.now_s = NOON_S + step * 0.05
        assert isinstance(await store.reserve(f"s{step}", [bucket], whole(0), LEASE_S), Granted)
        await store.settle(f"s{step}", tokens(0))
    clock.now_s = NOON_S + 1_000
    assert await counts(store, bucket) == [(1_000_000 - 700, 0, 700)]


async def test_nested_holds_cannot_squeeze_more_than_burst_and_rate_out_of_a_bucket(
    store: QuotaStore, clock: Clock
) -> None:
    # Holding before a refill and giving back after it must not add the two up.
    bucket = limit(amount=100, rate_per_s=10)
    await store.reserve("first", [bucket], whole(100), 1_000)
    clock.advance(10)
    assert isinstance(await store.reserve("second", [bucket], whole(1), 1_000), Denied)
    await store.settle("first", tokens(0))
    assert isinstance(await store.reserve("second", [bucket], whole(100), 1_000), Granted)
    assert isinstance(await store.reserve("third", [bucket], whole(1), 1_000), Denied)


async def test_used_held_and_available_of_a_bucket_add_up_to_its_burst(
    store: QuotaStore, clock: Clock
) -> None:
    bucket = limit(amount=100, rate_per_s=3)
    await store.reserve("a", [bucket], whole(50), LEASE_S)
    await store.settle("a", tokens(33))
    await store.reserve("b", [bucket], whole(20), LEASE_S)
    for _ in range(5):
        clock.advance(1.7)
        [state] = await store.states([bucket])
        assert state.used + state.held + state.available == 100


# ---------------------------------------------------------------- concurrency, soft, shadow, changes


async def test_concurrency_counts_what_runs(store: QuotaStore) -> None:
    two = limit(Meter.CONCURRENCY, amount=2)
    assert isinstance(await store.reserve("a", [two], whole(1), LEASE_S), Granted)
    assert isinstance(await store.reserve("b", [two], whole(1), LEASE_S), Granted)
    denied = await store.reserve("c", [two], whole(1), LEASE_S)
    assert isinstance(denied, Denied)
    assert denied.retry_after_s == 1.0
    await store.settle("a", tokens(1))
    assert isinstance(await store.reserve("c", [two], whole(1), LEASE_S), Granted)


@pytest.mark.parametrize("mode", [LimitMode.SOFT, LimitMode.SHADOW])
async def test_soft_and_shadow_limits_count_but_never_refuse(store: QuotaStore, mode: LimitMode) -> None:
    watched = limit(amount=10, mode=mode)
    first = await store.reserve("a", [watched], whole(10), LEASE_S)
    second = await store.reserve("b", [watched], whole(10), LEASE_S)
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    assert (first.exceeded, second.exceeded) == ((), (watched,))
    await store.settle("a", tokens(10))
    await store.settle("b", tokens(15))  # more than was held: nothing is at stake
    assert await counts(store, watched) == [(25, 0, 0)]


async def test_changing_the_amount_keeps_what_was_used(store: QuotaStore) -> None:
    small = limit(amount=10)
    await store.reserve("a", [small], whole(10), LEASE_S)
    await store.settle("a", tokens(8))
    large = dataclasses.replace(small, amount=20, limit_id="lim_other")
    assert await counts(store, large) == [(8, 0, 12)]
    tiny = dataclasses.replace(small, amount=5)
    assert await counts(store, tiny) == [(8, 0, 0)]
    assert isinstance(await store.reserve("b", [tiny], whole(0), LEASE_S), Granted)
    assert isinstance(await store.reserve("c", [tiny], whole(1), LEASE_S), Denied)


async def test_tiers_and_subjects_have_budgets_of_their_own(store: QuotaStore) -> None:
    limits = [
        limit(amount=10),
        limit(amount=10, tier=Tier.BATCH),
        limit(amount=10, kind=SubjectKind.KEY, subject_id="key_a"),
        limit(amount=10, kind=SubjectKind.KEY, subject_id="key_b"),
        limit(amount=10, tenant_id="ten_b"),
    ]
    await store.reserve("r", [limits[1], limits[2]], whole(4), LEASE_S)
    assert [state.held for state in await store.states(limits)] == [0, 4, 4, 0, 0]


async def test_models_and_long_requests_have_budgets_of_their_own(store: QuotaStore) -> None:
    limits = [
        limit(),
        limit(model="small"),
        limit(model="large"),
        limit(above_tokens=9),
        limit(above_tokens=99),
    ]
    await store.reserve("r", [limits[0], limits[1], limits[3]], whole(4), LEASE_S)
    await store.settle("r", tokens(3))
    assert [state.used for state in await store.states(limits)] == [3, 3, 0, 3, 0]


# ---------------------------------------------------------------- platform


async def test_tenants_share_the_platforms_limit_and_no_other(store: QuotaStore) -> None:
    all_together, one_at_a_time = on_platform(amount=100), on_platform(Meter.CONCURRENCY, amount=2)
    mine, other = limit(amount=90), limit(amount=90, tenant_id="ten_b")
    shared = [all_together, one_at_a_time]
    granted = await store.reserve("a", [mine, *shared], whole(60), LEASE_S)
    assert isinstance(granted, Granted)
    assert isinstance(await store.reserve("b", [other, *shared], whole(40), LEASE_S), Granted)
    denied = await store.reserve("c", [other, *shared], whole(1), LEASE_S)
    assert isinstance(denied, Denied)
    assert denied.limit.kind is SubjectKind.PLATFORM
    assert await counts(store, mine, other, *shared) == [(0, 60, 30), (0, 40, 50), (0, 100, 0), (0, 2, 0)]
    assert await store.settle("a", tokens(10))
    assert isinstance(await raised(store, "b", 50, used=40), Granted)
    assert await store.settle("b", tokens(45))
    assert await counts(store, mine, other, *shared) == [(10, 0, 80), (45, 0, 45), (55, 0, 45), (0, 0, 2)]


async def test_only_the_platform_may_limit_a_request(store: QuotaStore, clock: Clock) -> None:
    minute, bucket = on_platform(amount=50, window=Window.MINUTE), on_platform(amount=50, rate_per_s=1)
    await store.reserve("a", [minute, bucket], whole(20), LEASE_S)
    await store.reserve("b", [minute, bucket], whole(30), LEASE_S)
    assert await store.settle("a", tokens(20))
    clock.advance(LEASE_S)
    assert await store.expire() == ["b"]
    assert await counts(store, minute, bucket) == [(20, 0, 30), (0, 0, 50)]


# ---------------------------------------------------------------- end users


async def ask(store: QuotaStore, request_id: str, user: str, count: int = 1, **shape: Any) -> None:
    answer = await store.reserve(
        request_id, [limit(amount=10_000), on_user(user, **shape)], whole(count), LEASE_S
    )
    assert isinstance(answer, Granted)


async def test_each_end_user_has_a_counter_of_its_own(store: QuotaStore) -> None:
    await ask(store, "a", "amy", 60)
    await ask(store, "b", "bob", 70)
    assert isinstance(await store.reserve("c", [on_user("amy")], whole(41), LEASE_S), Denied)
    assert await counts(store, on_user("amy"), on_user("bob")) == [(0, 60, 40), (0, 70, 30)]
    assert await store.end_users("ten_a") == 2


async def test_one_end_user_too_many_is_refused_until_one_is_at_rest(store: QuotaStore, clock: Clock) -> None:
    for number, user in enumerate(("amy", "bob", "cid")):
        await ask(store, user, user, 2, window=Window.MINUTE)
        clock.advance(1)
        assert await store.settle(user, tokens(number))
    # Nothing of hers was used: she is at rest.
    await ask(store, "d", "dan", window=Window.MINUTE)
    for request_id in ("e", "e"):
        with pytest.raises(TooManyEndUsers) as caught:
            await ask(store, request_id, "eve", window=Window.MINUTE)
        assert (caught.value.most, caught.value.retry_after_s) == (MOST_USERS, 37)
    assert await store.end_users("ten_a") == MOST_USERS
    # Those who are known go on.
    await ask(store, "b2", "bob", 99, window=Window.MINUTE)
    states = [on_user(user, window=Window.MINUTE) for user in ("amy", "bob", "cid", "dan", "eve")]
    assert [state.used + state.held for state in await store.states(states)] == [0, 100, 2, 1, 0]
    # The minute is over for cid; for bob and dan it lasts as long as their requests.
    clock.advance(37)
    await ask(store, "e", "eve", window=Window.MINUTE)
    with pytest.raises(TooManyEndUsers) as caught:
        await ask(store, "f", "fay", window=Window.MINUTE)
    assert caught.value.retry_after_s == 1
    assert await store.end_users("ten_a") == MOST_USERS
    assert await store.end_users("ten_b") == 0


async def test_a_bucket_is_at_rest_when_it_is_full_and_a_lifetime_never(
    store: QuotaStore, clock: Clock
) -> None:
    await ask(store, "a", "amy", rate_per_s=2)
    await ask(store, "b", "bob")
    await ask(store, "c", "cid", meter=Meter.CONCURRENCY)
    for request_id in ("a", "b", "c"):
        await store.settle(request_id, tokens(1))
    await ask(store, "d", "dan", rate_per_s=2)  # in cid's place
    with pytest.raises(TooManyEndUsers) as caught:
        await ask(store, "e", "eve", rate_per_s=2)
    assert caught.value.retry_after_s == 0.5
    clock.advance(0.5)
    await ask(store, "e", "eve", rate_per_s=2)  # in amy's
    assert await store.settle("d", tokens(0))
    await ask(store, "f", "fay")  # in dan's
    assert await store.settle("f", tokens(1))
    assert await store.settle("e", tokens(1))
    clock.advance(1_000)
    await ask(store, "g", "gil")  # in eve's
    assert await store.settle("g", tokens(1))
    with pytest.raises(TooManyEndUsers) as caught:
        await ask(store, "h", "hal")
    assert caught.value.retry_after_s is None
    assert await counts(store, on_user("bob"), on_user("fay"), on_user("gil")) == [(1, 0, 99)] * 3


async def test_a_clock_that_steps_back_gives_no_end_user_its_window_again(
    store: QuotaStore, clock: Clock
) -> None:
    await ask(store, "a", "amy", 60, window=Window.MINUTE)
    await store.settle("a", tokens(60))
    await ask(store, "b", "bob", window=Window.MINUTE)
    await ask(store, "c", "cid", window=Window.MINUTE)
    clock.advance(41)
    await ask(store, "d", "dan", window=Window.MINUTE)  # in amy's place
    assert await store.settle("d", tokens(0))
    clock.advance(-5)
    with pytest.raises(TooManyEndUsers) as caught:
        await ask(store, "a2", "amy", 60, window=Window.MINUTE)
    assert caught.value.retry_after_s == 4
    await ask(store, "b2", "bob", window=Window.MINUTE)
    clock.advance(4)
    await ask(store, "a2", "amy", 60, window=Window.MINUTE)


async def test_a_refused_end_user_takes_no_place(store: QuotaStore) -> None:
    assert isinstance(await store.reserve("a", [on_user("amy")], whole(101), LEASE_S), Denied)
    assert await store.end_users("ten_a") == 0


async def test_ten_thousand_end_users_in_a_minute_have_bounded_counters(
    store: QuotaStore, clock: Clock
) -> None:
    """The limits of those that are kept stay exact."""
    kept, refused = set(), 0
    for number in range(10_000):
        user = f"u{number}"
        for attempt in range(1 + (user in kept or number < 5)):
            try:
                await ask(store, f"{user} {attempt}", user, 50, window=Window.MINUTE)
            except TooManyEndUsers:
                refused += 1
                continue
            kept.add(user)
            await store.settle(f"{user} {attempt}", tokens(50))
    assert (len(kept), await store.end_users("ten_a")) == (MOST_USERS, MOST_USERS)
    assert refused == 10_000 - MOST_USERS + 2
    for user in kept:
        with pytest.raises(AssertionError):
            await ask(store, "more", user, 1, window=Window.MINUTE)
    clock.advance(60)
    await ask(store, "new", "u9999", 100, window=Window.MINUTE)


# ---------------------------------------------------------------- top-ups


async def test_a_top_up_raises_the_hold_or_changes_nothing(store: QuotaStore) -> None:
    budget, requests = limit(amount=100), limit(Meter.REQUESTS, amount=1)
    await store.reserve("r", [budget, requests], whole(40), LEASE_S)
    granted = await raised(store, "r", 100)
    assert isinstance(granted, Granted)
    assert granted.covered.output_tokens == 100
    denied = await raised(store, "r", 101)
    assert isinstance(denied, Denied)
    assert (denied.limit, denied.wanted, denied.available) == (budget, 1, 0)
    assert await counts(store, budget, requests) == [(0, 100, 0), (0, 1, 0)]
    assert await store.settle("r", tokens(100))
    assert await counts(store, budget, requests) == [(100, 0, 0), (1, 0, 0)]
    with pytest.raises(KeyError):
        await raised(store, "r", 101)


async def test_a_repeated_or_older_top_up_changes_nothing(store: QuotaStore) -> None:
    window, bucket = limit(amount=100), limit(amount=90, rate_per_s=0.001)
    await store.reserve("r", [window, bucket], stepwise(10, 10, 10), LEASE_S)
    for _ in range(2):
        granted = await store.top_up("r", tokens(10), tokens(30), tokens(50))
        assert isinstance(granted, Granted)
        assert granted.covered.output_tokens == 30
        assert await counts(store, window, bucket) == [(0, 50, 50), (10, 20, 60)]
    older = await store.top_up("r", tokens(5), tokens(20), tokens(20))
    assert isinstance(older, Granted)
    assert older.covered.output_tokens == 30
    assert await counts(store, window, bucket) == [(0, 50, 50), (10, 20, 60)]


async def test_a_top_up_that_one_limit_refuses_is_held_on_none(store: QuotaStore) -> None:
    wide, narrow = limit(amount=100, window=Window.DAY), limit(amount=30)
    await store.reserve("r", [wide, narrow], whole(20), LEASE_S)
    assert isinstance(await raised(store, "r", 31), Denied)
    assert await counts(store, wide, narrow) == [(0, 20, 80), (0, 20, 10)]


async def test_windows_hold_what_is_wanted_ahead_as_far_as_there_is_room(store: QuotaStore) -> None:
    wide, narrow = limit(amount=100, window=Window.DAY), limit(amount=30)
    granted = await store.reserve("r", [wide, narrow], stepwise(10, 40, 60, may_be_cut=True), LEASE_S)
    assert isinstance(granted, Granted)
    assert granted.covered.output_tokens == 30
    assert await counts(store, wide, narrow) == [(0, 40, 60), (0, 30, 0)]
    granted = await store.top_up("r", tokens(30), tokens(30), tokens(60))
    assert isinstance(granted, Granted)
    assert granted.covered.output_tokens == 30
    assert await counts(store, wide, narrow) == [(0, 60, 40), (0, 30, 0)]


async def test_a_top_up_is_held_on_the_window_of_the_request_also_after_its_end(
    store: QuotaStore, clock: Clock
) -> None:
    minute, lifetime = limit(amount=100, window=Window.MINUTE), limit(amount=500)
    await store.reserve("r", [minute, lifetime], whole(70), 1_000)
    await store.reserve("done", [minute, lifetime], whole(10), 1_000)
    await store.settle("done", tokens(10))
    clock.advance(60)
    await store.reserve("s", [minute, lifetime], whole(90), 1_000)
    denied = await raised(store, "r", 91)
    assert isinstance(denied, Denied)
    assert (denied.limit, denied.available, denied.retry_after_s) == (minute, 20, None)
    assert [(state.used, state.held) for state in denied.states] == [(0, 90), (10, 160)]
    assert isinstance(await raised(store, "r", 90), Granted)
    assert isinstance(await raised(store, "r", 91), Denied)
    assert await counts(store, minute, lifetime) == [(0, 90, 10), (10, 180, 310)]
    assert await store.settle("r", tokens(90))
    assert await counts(store, minute, lifetime) == [(0, 90, 10), (100, 90, 310)]


async def test_a_window_that_is_over_and_forgotten_has_no_room_for_top_ups(
    store: QuotaStore, clock: Clock
) -> None:
    minute = limit(amount=100, window=Window.MINUTE)
    await store.reserve("r", [minute], whole(0), 1_000)
    clock.advance(60)
    await store.reserve("s", [minute], whole(5), 1_000)
    assert isinstance(await raised(store, "r", 1), Denied)
    assert await store.settle("r", tokens(0))
    assert await counts(store, minute) == [(0, 5, 95)]


async def test_a_refused_top_up_says_whether_waiting_helps(store: QuotaStore, clock: Clock) -> None:
    minute = limit(amount=100, window=Window.MINUTE)
    await store.reserve("other", [minute], whole(50), 1_000)
    await store.reserve("r", [minute], whole(50), 1_000)
    blocked = await raised(store, "r", 60)
    assert isinstance(blocked, Denied)
    assert blocked.retry_after_s == 1.0  # the other one may not use what it holds
    await store.settle("other", tokens(50))
    spent = await raised(store, "r", 60)
    assert isinstance(spent, Denied)
    assert spent.retry_after_s is None  # the request stays with its window: the next one is not for it


async def test_what_more_was_used_than_held_is_refused_by_top_ups_too(store: QuotaStore) -> None:
    budget, bucket = limit(amount=100), limit(amount=50, rate_per_s=0.001)
    await store.reserve("r", [bucket, budget], whole(20), LEASE_S)
    with pytest.raises(Overrun):
        await store.top_up("r", tokens(21), tokens(30), tokens(30))
    assert await counts(store, budget, bucket) == [(0, 20, 80), (0, 20, 30)]


async def test_covered_is_the_least_that_any_hard_limit_holds(store: QuotaStore) -> None:
    limits = [
        limit(amount=40),
        limit(Meter.OUTPUT_TOKENS, amount=90),
        limit(Meter.COST_NANOUSD, amount=700),
        limit(Meter.INPUT_TOKENS, amount=3, mode=LimitMode.SHADOW),
    ]
    first, ahead = Amounts(10, 5, 100, gpu_ms=1), Amounts(10, 80, 900, gpu_ms=8)
    granted = await store.reserve("r", limits, Hold(first, ahead, ahead, may_be_cut=True), LEASE_S)
    assert isinstance(granted, Granted)
    assert granted.covered == Amounts(10, 30, 700, gpu_ms=8)
    assert granted.would_deny == (limits[3],)
    free = await store.reserve("free", [], Hold(first, ahead, ahead), LEASE_S)
    assert isinstance(free, Granted)
    assert free.covered == ahead


async def test_shadow_limits_say_what_they_would_have_denied(store: QuotaStore) -> None:
    shadow, soft = (
        limit(amount=50, mode=LimitMode.SHADOW),
        limit(Meter.OUTPUT_TOKENS, 50, mode=LimitMode.SOFT),
    )
    first = await store.reserve("a", [shadow, soft], stepwise(10, 20, 40), LEASE_S)
    second = await store.reserve("b", [shadow, soft], stepwise(10, 20, 40), LEASE_S)
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    assert (first.would_deny, second.would_deny) == ((), (shadow,))
    third = await store.top_up("a", tokens(20), tokens(41), tokens(41))
    assert isinstance(third, Granted)
    assert third.would_deny == (shadow,)


# ---------------------------------------------------------------- buckets while a stream runs


async def test_a_stream_is_shaped_to_the_rate_after_the_burst(store: QuotaStore, clock: Clock) -> None:
    bucket = limit(amount=10, rate_per_s=100)
    granted = await store.reserve("r", [bucket], stepwise(5, 400, 400), 1_000)
    assert isinstance(granted, Granted)
    started_s, emitted, at_s = clock.now_s, granted.covered.output_tokens, {}
    assert emitted == 5
    while emitted < 400:
        answer = await store.top_up("r", tokens(emitted), tokens(emitted + 5), tokens(400))
        if isinstance(answer, Denied):
            assert answer.retry_after_s is not None
            clock.advance(answer.retry_after_s)
        else:
            emitted = answer.covered.output_tokens
            at_s[emitted] = clock.now_s - started_s
    assert at_s[10] == 0  # the burst
    assert (350 - 50) / (at_s[350] - at_s[50]) == pytest.approx(100, rel=0.001)
    assert await store.settle("r", tokens(400))


async def test_what_a_bucket_was_charged_while_running_stays_charged(store: QuotaStore) -> None:
    bucket = limit(amount=50, rate_per_s=0.001)
    await store.reserve("r", [bucket], whole(20), LEASE_S)
    await store.top_up("r", tokens(15), tokens(20), tokens(20))
    assert await counts(store, bucket) == [(15, 5, 30)]
    assert await store.settle("r", tokens(18))
    assert await counts(store, bucket) == [(18, 0, 32)]
    await store.reserve("s", [bucket], whole(20), LEASE_S)
    await store.top_up("s", tokens(15), tokens(20), tokens(20))
    assert await store.settle("s", tokens(0))
    assert await counts(store, bucket) == [(33, 0, 17)]


async def test_a_refused_top_up_still_charges_what_was_used(store: QuotaStore, clock: Clock) -> None:
    bucket = limit(amount=10, rate_per_s=1)
    await store.reserve("r", [bucket], whole(10), LEASE_S)
    denied = await raised(store, "r", 15, used=10)
    assert isinstance(denied, Denied)
    assert denied.retry_after_s == 5.0
    clock.advance(5)
    assert isinstance(await raised(store, "r", 15, used=10), Granted)


async def test_the_largest_buckets_are_counted_to_the_last_token(store: QuotaStore, clock: Clock) -> None:
    # One millionth of a token is missing, which a rounded division would not see.
    bucket = limit(amount=9_000_000_000, rate_per_s=0.001)
    await store.reserve("r", [bucket], whole(1), 2_000)
    await store.settle("r", tokens(1))
    clock.advance(999.999)
    assert isinstance(await store.reserve("s", [bucket], whole(9_000_000_000), LEASE_S), Denied)
    assert isinstance(await store.reserve("s", [bucket], whole(8_999_999_999), LEASE_S), Granted)


# ---------------------------------------------------------------- promises


async def test_who_may_not_be_cut_is_promised_the_worst_case(store: QuotaStore) -> None:
    budget = limit(amount=100)
    granted = await store.reserve("a", [budget], stepwise(10, 20, 60), LEASE_S)
    assert isinstance(granted, Granted)
    assert granted.covered.output_tokens == 20
    [state] = granted.states
    assert (state.held, state.worst_open, state.available) == (20, 40, 40)
    refused = await store.reserve("b", [budget], stepwise(10, 10, 41), LEASE_S)
    assert isinstance(refused, Denied)
    assert (refused.wanted, refused.available, refused.retry_after_s) == (41, 40, 1.0)
    # One that may be cut takes what no request was promised.
    cut = await store.reserve("c", [budget], stepwise(10, 80, 80, may_be_cut=True), LEASE_S)
    assert isinstance(cut, Granted)
    assert cut.covered.output_tokens == 40
    assert isinstance(await raised(store, "c", 41), Denied)
    assert isinstance(await raised(store, "a", 60), Granted)
    [state] = await store.states([budget])
    assert (state.held, state.worst_open, state.available) == (100, 0, 0)
    # Beyond its promise it has no more rights than others.
    assert isinstance(await raised(store, "a", 61), Denied)


async def test_a_promise_survives_a_lowered_amount_and_ends_with_its_request(store: QuotaStore) -> None:
    budget = limit(amount=100)
    small = dataclasses.replace(budget, amount=30)
    await store.reserve("a", [budget], stepwise(10, 20, 60), LEASE_S)
    assert isinstance(await store.reserve("b", [small], stepwise(1, 1, 1), LEASE_S), Denied)
    assert isinstance(await raised(store, "a", 60), Granted)
    await store.settle("a", tokens(25))
    [state] = await store.states([small])
    assert (state.used, state.held, state.worst_open, state.available) == (25, 0, 0, 5)


async def test_a_promise_is_kept_after_the_end_of_its_window(store: QuotaStore, clock: Clock) -> None:
    minute = limit(amount=100, window=Window.MINUTE)
    await store.reserve("a", [minute], stepwise(0, 0, 60), 1_000)
    clock.advance(60)
    await store.reserve("b", [minute], whole(100), 1_000)
    assert isinstance(await raised(store, "a", 0), Granted)
    granted = await raised(store, "a", 60)
    assert isinstance(granted, Granted)
    assert granted.covered.output_tokens == 60
    assert await counts(store, minute) == [(0, 100, 0)]


async def test_expired_promises_are_free_again(store: QuotaStore, clock: Clock) -> None:
    budget = limit(amount=100)
    await store.reserve("a", [budget], stepwise(10, 20, 100), 30)
    clock.advance(30)
    assert await store.overdue() == ["a"]
    assert await store.expire() == ["a"]
    assert await store.overdue() == []
    assert isinstance(await store.reserve("b", [budget], whole(100), 30), Granted)


# ---------------------------------------------------------------- GPU time


def gpu(count: int) -> Amounts:
    return Amounts(gpu_ms=count)


async def test_gpu_time_is_charged_beyond_the_hold_and_the_bucket_pays_it_off(
    store: QuotaStore, clock: Clock
) -> None:
    bucket, window = limit(Meter.GPU_MS, 50, rate_per_s=10), limit(Meter.GPU_MS, 1_000)
    await store.reserve("r", [bucket, window], Hold.whole(gpu(40)), LEASE_S)
    # The step took 70 ms where 40 were predicted.
    denied = await store.top_up("r", gpu(70), gpu(80), gpu(80))
    assert isinstance(denied, Denied)
    assert (denied.limit, denied.retry_after_s) == (bucket, 3.0)
    assert await counts(store, bucket, window) == [(70, 0, 0), (0, 70, 930)]
    assert await store.settle("r", gpu(75))
    assert await counts(store, bucket, window) == [(75, 0, 0), (75, 0, 925)]
    clock.advance(2.5)
    assert await counts(store, bucket) == [(50, 0, 0)]
    clock.advance(1)
    assert await counts(store, bucket) == [(40, 0, 10)]


# ---------------------------------------------------------------- leases


async def test_a_lease_that_runs_out_gives_everything_back(store: QuotaStore, clock: Clock) -> None:
    budget, one = limit(amount=100), limit(Meter.CONCURRENCY, amount=1)
    await store.reserve("r", [budget, one], whole(60), 30)
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
    await store.reserve("a", [budget], whole(60), 30)
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
        await store.reserve(f"r{index}", [limits[tenant_id]], whole(1), 5)
    clock.advance(5)
    assert sorted(await store.expire()) == sorted(f"r{index}" for index in range(300))
    assert await counts(store, *limits.values()) == [(0, 0, 10_000)] * 3


# ---------------------------------------------------------------- concurrency, rebuilding, the door


async def test_fifty_at_once_never_exceed_a_hard_limit(store: QuotaStore) -> None:
    budget = limit(amount=1_000)
    bucket = limit(amount=950, rate_per_s=0.001)

    async def one(index: int) -> int:
        answer = await store.reserve(f"r{index}", [budget, bucket], whole(37), LEASE_S)
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


async def test_repairing_sets_what_was_used_and_keeps_what_is_held(store: QuotaStore) -> None:
    window, bucket = limit(amount=100, window=Window.HOUR), limit(amount=100, rate_per_s=0.001)
    one = limit(Meter.CONCURRENCY, amount=5)
    await store.reserve("r", [window, bucket, one], whole(10), LEASE_S)
    await store.rebuild([(window, 70), (bucket, 60), (one, 0)])
    assert await counts(store, window, bucket, one) == [(70, 10, 20), (60, 10, 30), (0, 1, 4)]
    await store.settle("r", tokens(5))
    assert await counts(store, window, bucket, one) == [(75, 0, 25), (65, 0, 35), (0, 0, 5)]
    # More than a burst was used: it is empty, not in debt.
    await store.rebuild([(bucket, 400)])
    assert await counts(store, bucket) == [(100, 0, 0)]


async def test_repairing_an_end_users_counter_says_when_it_is_at_rest(
    store: QuotaStore, clock: Clock
) -> None:
    minute, bucket = (on_user("amy", **shape) for shape in ({"window": Window.MINUTE}, {"rate_per_s": 1}))
    await store.rebuild([(minute, 70), (bucket, 60), (on_user("bob"), 1), (on_user("cid"), 0)])
    assert await store.end_users("ten_a") == MOST_USERS
    await ask(store, "d", "dan")  # in cid's place
    with pytest.raises(TooManyEndUsers) as caught:
        await ask(store, "e", "eve")
    assert caught.value.retry_after_s == 60
    clock.advance(60)
    await ask(store, "e", "eve")
    assert await counts(store, minute, bucket) == [(0, 0, 100), (0, 0, 100)]


async def test_nobody_rebuilds_a_store_that_lost_nothing(store: QuotaStore) -> None:
    assert not await store.begin_rebuild("somebody", 60)
    await store.ping()
    with pytest.raises(QuotaStoreRecovering):
        await store.restore("r", [], (), whole(1), tokens(0), LEASE_S)


@pytest.fixture(params=STORES)
async def new_store(request: pytest.FixtureRequest, clock: Clock) -> AsyncIterator[QuotaStore]:
    """It is not filled yet."""
    if request.param == "memory":
        yield MemoryQuotaStore(clock, max_end_users=MOST_USERS)
    else:
        shared = redis_store(request, clock)
        yield FallbackQuotaStore(shared, 10, clock) if request.param == "fallback" else shared
        await shared.close()


async def test_while_it_is_rebuilt_a_store_does_nothing_else(new_store: QuotaStore, clock: Clock) -> None:
    budget = limit(amount=100)
    assert await new_store.begin_rebuild("first", 10)
    assert not await new_store.begin_rebuild("second", 10)
    for attempt in (
        new_store.reserve("r", [budget], whole(1), LEASE_S),
        new_store.top_up("r", tokens(0), tokens(1), tokens(1)),
        new_store.settle("r", tokens(1)),
        new_store.renew(["r"], LEASE_S),
        new_store.expire(),
        new_store.overdue(),
        new_store.states([budget]),
        new_store.ping(),
    ):
        with pytest.raises(QuotaStoreRecovering):
            await attempt
    # Who dies over it loses the right to.
    await new_store.rebuild([(budget, 90)])
    clock.advance(10)
    assert await new_store.begin_rebuild("second", 10)
    await new_store.rebuild([(budget, 40)])
    await new_store.finish_rebuild("second", "e1")
    assert await counts(new_store, budget) == [(40, 0, 60)]


async def test_a_new_attempt_begins_with_nothing(new_store: QuotaStore) -> None:
    budget, other = limit(amount=100), limit(Meter.OUTPUT_TOKENS, amount=100)
    assert await new_store.begin_rebuild("me", 10)
    await new_store.rebuild([(budget, 40), (other, 40)])
    await new_store.restore("r", [budget], [f"{_name(budget)}@0"], whole(5), tokens(0), LEASE_S)
    assert await new_store.begin_rebuild("me", 10)
    await new_store.rebuild([(budget, 10)])
    await new_store.finish_rebuild("me", "e1")
    assert await counts(new_store, budget, other) == [(10, 0, 90), (0, 0, 100)]
    assert not await new_store.settle("r", tokens(1))


async def test_what_open_requests_held_is_held_again_whether_there_is_room_or_not(
    new_store: QuotaStore, clock: Clock
) -> None:
    window, bucket = limit(amount=100), limit(amount=200, rate_per_s=0.001)
    one, over = limit(Meter.CONCURRENCY, amount=1), limit(amount=80, window=Window.MINUTE)
    unknown = limit(Meter.OUTPUT_TOKENS, amount=5)
    limits = [window, bucket, one, over, unknown]
    charged_to = [f"{_name(window)}@0", _name(bucket), _name(one), f"{_name(over)}@{int(NOON_S) - 80}"]
    hold = stepwise(20, 30, 60)
    assert await new_store.begin_rebuild("me", 10)
    await new_store.rebuild([(window, 90), (bucket, 10), (one, 0), (over, 7)])
    for request_id in ("r", "r", "s"):
        await new_store.restore(request_id, limits, charged_to, hold, tokens(15), LEASE_S)
    await new_store.finish_rebuild("me", "e1")
    assert await counts(new_store, *limits) == [(90, 60, 0), (10, 10, 180), (0, 2, 0), (7, 0, 73), (0, 0, 5)]
    [state, *_] = await new_store.states([window])
    assert state.worst_open == 60
    # Its promise holds in the window that is over, too; beyond it no room there is known.
    assert isinstance(await new_store.top_up("r", tokens(20), tokens(60), tokens(60)), Granted)
    denied = await new_store.top_up("r", tokens(20), tokens(61), tokens(61))
    assert isinstance(denied, Denied)
    assert await new_store.settle("r", tokens(60))
    assert await new_store.settle("s", tokens(20))
    assert await counts(new_store, window, one, over) == [(170, 0, 0), (0, 0, 1), (7, 0, 73)]
    clock.advance(LEASE_S)
    assert await new_store.expire() == []


async def test_the_platform_and_end_users_are_rebuilt_with_their_tenants(new_store: QuotaStore) -> None:
    mine, user, everyone = limit(), on_user("amy"), on_platform()
    limits = [mine, user, everyone]
    assert await new_store.begin_rebuild("me", 10)
    await new_store.rebuild([(each, 10) for each in limits])
    charged_to = [f"{_name(each)}@0" for each in limits]
    await new_store.restore("r", limits, charged_to, whole(20), tokens(5), LEASE_S)
    await new_store.restore("s", [everyone], charged_to, whole(20), tokens(5), LEASE_S)
    await new_store.finish_rebuild("me", "e1")
    assert await counts(new_store, *limits) == [(10, 20, 70), (10, 20, 70), (10, 40, 50)]
    assert await new_store.end_users("ten_a") == 1
    # What was restored holds on the end user's counters as before.
    for name in ("bob", "cid"):
        assert isinstance(await new_store.reserve(name, [on_user(name)], whole(1), LEASE_S), Granted)
    with pytest.raises(TooManyEndUsers) as caught:
        await new_store.reserve("dan", [on_user("dan")], whole(1), LEASE_S)
    assert caught.value.retry_after_s == 1
    assert await new_store.settle("r", tokens(20))
    assert await new_store.settle("s", tokens(20))
    assert await counts(new_store, *limits) == [(30, 0, 70), (30, 0, 70), (50, 0, 50)]


async def test_a_restored_window_that_is_over_has_room_for_its_promises_only(new_store: QuotaStore) -> None:
    minute = limit(amount=80, window=Window.MINUTE)
    charged_to = [f"{_name(minute)}@{int(NOON_S) - 80}"]
    assert await new_store.begin_rebuild("me", 10)
    await new_store.restore("r", [minute], charged_to, stepwise(20, 30, 60), tokens(0), LEASE_S)
    await new_store.finish_rebuild("me", "e1")
    assert isinstance(await raised(new_store, "r", 60), Granted)
    assert isinstance(await raised(new_store, "r", 61), Denied)
    assert await counts(new_store, minute) == [(0, 0, 80)]


async def test_a_window_may_end_while_its_holds_are_restored(new_store: QuotaStore, clock: Clock) -> None:
    minute = limit(amount=80, window=Window.MINUTE)
    assert await new_store.begin_rebuild("me", 300)
    await new_store.rebuild([(minute, 7)])
    for request_id, start_s in (("old", NOON_S - 20), ("new", NOON_S + 40)):
        charged_to = [f"{_name(minute)}@{int(start_s)}"]
        await new_store.restore(request_id, [minute], charged_to, stepwise(20, 30, 60), tokens(0), 300)
        clock.advance(60)
    clock.advance(-60)
    await new_store.finish_rebuild("me", "e1")
    assert await counts(new_store, minute) == [(0, 30, 20)]
    for request_id in ("old", "new"):
        granted = await raised(new_store, request_id, 60)
        assert isinstance(granted, Granted)
        assert granted.covered.output_tokens == 60
    assert await counts(new_store, minute) == [(0, 60, 20)]


def _name(of: Limit) -> str:
    return of.identity


@pytest.mark.parametrize(
    ("field", "request_id", "limits", "amounts", "lease_s"),
    [
        ("output_tokens", "r", [limit()], Amounts(output_tokens=-1), 30.0),
        ("cost_nanousd", "r", [limit()], Amounts(cost_nanousd=10**16), 30.0),
        ("input_tokens", "r", [limit()], Amounts(input_tokens=1.5), 30.0),  # type: ignore[arg-type]
        ("gpu_ms", "r", [limit()], Amounts(gpu_ms=-1), 30.0),
        ("request_id", "", [limit()], Amounts(), 30.0),
        ("request_id", "x" * 81, [limit()], Amounts(), 30.0),
        ("lease_ttl_s", "r", [limit()], Amounts(), 0.0),
        ("limits", "r", [limit(), limit()], Amounts(), 30.0),
        ("limits", "r", [limit(), limit(tenant_id="ten_b")], Amounts(), 30.0),
        ("limits", "r", [on_user("amy"), on_user("bob")], Amounts(), 30.0),
        ("limits", "r", [limit(subject_id=f"key_{n}") for n in range(193)], Amounts(), 30.0),
        ("amount", "r", [limit(amount=10**16)], Amounts(), 30.0),
        ("amount", "r", [limit(amount=10**10, rate_per_s=1)], Amounts(), 30.0),
        ("rate_per_s", "r", [limit(amount=10, rate_per_s=0.0001)], Amounts(), 30.0),
    ],
)
async def test_what_cannot_be_counted_exactly_is_refused_at_the_door(
    store: QuotaStore, field: str, request_id: str, limits: list[Limit], amounts: Amounts, lease_s: float
) -> None:
    with pytest.raises(Invalid) as caught:
        await store.reserve(request_id, limits, Hold.whole(amounts), lease_s)
    assert caught.value.field == field


async def test_a_store_that_is_there_answers_a_ping(store: QuotaStore) -> None:
    await store.ping()


@pytest.mark.parametrize(
    ("first", "ahead", "most"), [(2, 1, 3), (1, 4, 3)], ids=["ahead below first", "most below ahead"]
)
async def test_a_hold_that_falls_is_refused_at_the_door(
    store: QuotaStore, first: int, ahead: int, most: int
) -> None:
    with pytest.raises(Invalid, match="fall") as caught:
        await store.reserve("r", [limit()], stepwise(first, ahead, most), LEASE_S)
    assert caught.value.field == "output_tokens"
    await store.reserve("r", [limit()], whole(1), LEASE_S)
    with pytest.raises(Invalid):
        await store.top_up("r", tokens(1), tokens(3), tokens(2))


# ---------------------------------------------------------------- limits that come later


async def rebound(
    store: QuotaStore, limits: list[Limit], held: int, *, most: int = 0, used: int = 0, must_fit: bool
) -> Granted | Denied:
    """Request `r` under `limits`, with so many output tokens held."""
    hold = Hold(tokens(held), tokens(held), tokens(max(held, most)), may_be_cut=not most)
    return await store.rebind("r", limits, hold, tokens(used), must_fit=must_fit)


@pytest.mark.parametrize("first", [[], [limit(Meter.REQUESTS, amount=10)]], ids=["no limit", "another limit"])
async def test_a_request_comes_under_a_limit_that_was_set_while_it_waits(
    store: QuotaStore, first: list[Limit]
) -> None:
    budget = limit(amount=100)
    await store.reserve("r", first, whole(60), LEASE_S, tenant_id="ten_a")
    for _ in range(2):  # a repeat changes nothing
        answer = await rebound(store, [*first, budget], 60, most=80, must_fit=True)
        assert isinstance(answer, Granted)
        assert [name.partition("@")[0] for name in answer.charged_to] == [
            each.identity for each in [*first, budget]
        ]
        assert await counts(store, budget) == [(0, 60, 20)]
    assert await store.settle("r", tokens(50))
    assert await counts(store, budget) == [(50, 0, 50)]


async def test_where_a_later_limit_has_no_room_nothing_changes(store: QuotaStore) -> None:
    budget = limit(amount=100)
    await store.reserve("s", [budget], whole(50), LEASE_S)
    await store.reserve("r", [], whole(60), LEASE_S, tenant_id="ten_a")
    denied = await rebound(store, [budget], 60, must_fit=True)
    assert isinstance(denied, Denied)
    assert (denied.limit, denied.wanted, denied.available) == (budget, 60, 50)
    assert await counts(store, budget) == [(0, 50, 50)]
    assert await store.settle("r", tokens(60))
    assert await counts(store, budget) == [(0, 50, 50)]


async def test_what_runs_counts_on_a_later_limit_whatever_room_it_has(store: QuotaStore) -> None:
    budget, rate = limit(amount=50), limit(amount=100, rate_per_s=1)
    await store.reserve("r", [], whole(60), LEASE_S, tenant_id="ten_a")
    assert isinstance(await rebound(store, [budget, rate], 60, used=40, must_fit=False), Granted)
    # Of the bucket only what is still to come is held.
    assert await counts(store, budget, rate) == [(0, 60, 0), (0, 20, 80)]
    denied = await raised(store, "r", 70, used=50)
    assert isinstance(denied, Denied), "a top-up goes by the limit in force"
    assert denied.limit == budget
    assert await store.settle("r", tokens(60))
    assert await counts(store, budget) == [(60, 0, 0)]


async def test_a_limit_that_was_lowered_binds_what_waits_and_one_that_was_raised_lets_it_grow(
    store: QuotaStore,
) -> None:
    budget = limit(amount=100)
    await store.reserve("s", [budget], whole(30), LEASE_S)
    await store.reserve("r", [budget], whole(60), LEASE_S)
    lower, higher = dataclasses.replace(budget, amount=80), dataclasses.replace(budget, amount=200)
    denied = await rebound(store, [lower], 60, must_fit=True)
    assert isinstance(denied, Denied)
    assert (denied.limit, denied.wanted, denied.available) == (lower, 60, 50)
    assert isinstance(await raised(store, "r", 120), Denied)
    assert isinstance(await rebound(store, [higher], 60, must_fit=True), Granted)
    assert isinstance(await raised(store, "r", 120), Granted)
    assert await counts(store, higher) == [(0, 150, 50)]


@pytest.mark.parametrize("mode", [LimitMode.SOFT, LimitMode.SHADOW])
async def test_a_rate_that_did_not_bind_what_runs_holds_all_that_it_may_use_once_it_does(
    store: QuotaStore, mode: LimitMode
) -> None:
    watching = limit(amount=100, rate_per_s=1, mode=mode)
    granted = await store.reserve("r", [watching], stepwise(1, 60, 60), LEASE_S)
    assert isinstance(granted, Granted)
    assert granted.covered.output_tokens == 60
    assert await counts(store, watching) == [(0, 1, 99)]
    binding = dataclasses.replace(watching, mode=LimitMode.HARD)
    for _ in range(2):  # a repeat changes nothing
        assert isinstance(await rebound(store, [binding], 60, must_fit=True), Granted)
        assert await counts(store, binding) == [(0, 60, 40)]
    assert isinstance(await raised(store, "r", 70, used=40), Granted)
    assert await counts(store, binding) == [(40, 30, 30)]
    assert isinstance(await rebound(store, [binding], 70, used=40, must_fit=False), Granted)
    assert await counts(store, binding) == [(40, 30, 30)]
    assert await store.settle("r", tokens(70))


async def test_an_end_users_later_limit_has_its_counter_and_gives_it_back(store: QuotaStore) -> None:
    of_user = on_user("amy", amount=100)
    await store.reserve("r", [], whole(60), LEASE_S, tenant_id="ten_a")
    assert isinstance(await rebound(store, [of_user], 60, must_fit=True), Granted)
    assert await store.end_users("ten_a") == 1
    assert await store.settle("r", tokens(50))
    assert await counts(store, of_user) == [(50, 0, 50)]


async def test_what_has_ended_does_not_come_under_a_limit(store: QuotaStore) -> None:
    with pytest.raises(KeyError):
        await rebound(store, [limit()], 1, must_fit=False)


# ---------------------------------------------------------------- refusals foreseen by states


SHAPES = {
    "window": limit(amount=100, window=Window.DAY),
    "lifetime": limit(amount=100),
    "bucket": limit(amount=100, rate_per_s=2.0),
    "requests": limit(Meter.REQUESTS, amount=1, window=Window.HOUR),
    "concurrency": limit(Meter.CONCURRENCY, amount=1),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("settled", [None, 70])
async def test_states_foretell_a_refusal(
    store: QuotaStore, clock: Clock, shape: str, settled: int | None
) -> None:
    limits = [SHAPES[shape], limit(Meter.OUTPUT_TOKENS, amount=1_000)]
    await store.reserve("first", limits, whole(70), LEASE_S)
    if settled is not None:
        await store.settle("first", tokens(settled))
    clock.advance(3.0)
    foretold: set[bool] = set()
    for number, wanted in enumerate((10, 30, 31, 90, 200)):
        states = await store.states(limits)
        expected = rules.refusal_by(states, whole(wanted))
        answer = await store.reserve(f"next-{number}", limits, whole(wanted), LEASE_S)
        foretold.add(expected is not None)
        if isinstance(answer, Denied):
            assert expected == answer
        else:
            assert expected is None
            await store.settle(f"next-{number}", Amounts(requests=0))
    if shape == "requests":
        assert foretold == {True}
    elif shape == "concurrency":
        assert foretold == {settled is None}
    else:
        assert foretold == {True, False}
