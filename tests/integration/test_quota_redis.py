"""RedisQuotaStore under its own faults: two gateways, a server that dies or loses scripts or counters,
another clock, clusters, foreign keys; and its number of round trips."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import redis

from tenants.errors import Invalid
from tenants.quota.redis import RedisQuotaStore
from tenants.quota.store import Denied, Granted, QuotaStoreRecovering, QuotaStoreUnavailable
from tenants.types import Amounts, LimitMode, Meter, SubjectKind, Window
from tests.support import services
from tests.support.quota import Clock, filled, limit, on_platform, on_user, stepwise, whole

CLUSTERS = [pytest.param(f"{kind}_cluster", marks=pytest.mark.long) for kind in ("redis", "valkey")]
EVERYWHERE = pytest.mark.parametrize("redis_url", ["redis_server", *CLUSTERS], indirect=True)
LUA = Path(__file__).parents[2] / "tenants" / "quota" / "lua"


def tokens(count: int) -> Amounts:
    return Amounts(output_tokens=count)


@pytest.fixture
async def stores(redis_url: str) -> AsyncIterator[tuple[RedisQuotaStore, RedisQuotaStore]]:
    """Two gateways on the server's own clock."""
    pair = RedisQuotaStore(redis_url, timeout_s=30), RedisQuotaStore(redis_url, timeout_s=30)
    await filled(pair[0])
    yield pair
    for store in pair:
        await store.close()


@EVERYWHERE
async def test_two_gateways_together_never_exceed_a_hard_limit(
    stores: tuple[RedisQuotaStore, RedisQuotaStore],
) -> None:
    budget, running = limit(amount=1_000), limit(Meter.CONCURRENCY, amount=20)
    highest = 0

    async def one(index: int) -> int:
        nonlocal highest
        store = stores[index % 2]
        answer = await store.reserve(f"r{index}", [budget, running], whole(60), 60)
        if isinstance(answer, Denied):
            return 0
        highest = max(highest, *(state.used + state.held for state in answer.states[:1]))
        assert await stores[(index + 1) % 2].settle(f"r{index}", tokens(41))  # the other one settles
        assert not await store.settle(f"r{index}", tokens(41))
        return 41

    spent = 0
    while (
        round_spent := sum(await asyncio.gather(*(one(spent * 1_000 + index) for index in range(50))))
    ) > 0:
        spent += round_spent
    assert highest <= 1_000
    [state, concurrency] = await stores[0].states([budget, running])
    assert (state.used, state.held, concurrency.held) == (spent, 0, 0)
    assert 1_000 - spent < 60


@EVERYWHERE
async def test_a_restarted_gateway_settles_tops_up_and_renews_what_it_never_reserved(
    stores: tuple[RedisQuotaStore, RedisQuotaStore], redis_url: str
) -> None:
    dead, restarted = stores
    for tenant_id in ("ten_a", "ten_b", "ten_c"):
        await dead.reserve(f"of-{tenant_id}", [limit(amount=100, tenant_id=tenant_id)], whole(50), 60)
    await restarted.renew(["of-ten_b", "nobody's"], 120)
    granted = await restarted.top_up("of-ten_b", tokens(10), tokens(100), tokens(100))
    assert isinstance(granted, Granted)
    assert granted.states[0].held == 100
    assert await restarted.settle("of-ten_b", tokens(99))
    assert not await restarted.settle("nobody's", tokens(1))
    assert not await dead.settle("of-ten_b", tokens(99))
    await restarted.settle("of-ten_c", tokens(1))
    with pytest.raises(KeyError):
        await dead.top_up("of-ten_c", tokens(1), tokens(1), tokens(1))
    await dead.renew(["of-ten_c"], 60)
    with services.open_redis(redis_url) as client:
        assert client.zrange("fairgate:{ten_c}:leases", 0, -1) == []


async def test_the_servers_clock_counts_not_the_gateways(
    stores: tuple[RedisQuotaStore, RedisQuotaStore],
) -> None:
    # This gateway believes to be an hour ahead; its windows must be the server's all the same.
    wrong, right = stores
    wrong._server_ahead_us = 3_600_000_000
    minute = limit(amount=100, window=Window.MINUTE)
    first = await wrong.reserve("a", [minute], whole(10), 60)
    second = await right.reserve("b", [minute], whole(10), 60)
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    if first.charged_to == second.charged_to:  # unless a minute has just turned
        assert second.states[0].held == 20
    started = int(first.charged_to[0].rpartition("@")[2])
    assert 0 <= time.time() - started < 120


async def test_each_operation_is_timed(stores: tuple[RedisQuotaStore, RedisQuotaStore]) -> None:
    first, second = stores

    def timed(store: RedisQuotaStore) -> float:
        (family,) = store.latency.collect()
        return next(each.value for each in family.samples if each.name == "fairgate_redis_seconds_count")

    before = timed(first), timed(second)
    await first.overdue()
    await first.end_users("t")
    await first.end_users("t")
    assert timed(first) >= before[0] + 2
    assert timed(second) == before[1]


@EVERYWHERE
async def test_a_server_that_forgot_the_scripts_is_told_them_again(
    stores: tuple[RedisQuotaStore, RedisQuotaStore], redis_url: str
) -> None:
    budget = limit(amount=100)
    await stores[0].reserve("a", [budget], whole(10), 60)
    with services.open_redis(redis_url) as client:
        client.script_flush()
    assert isinstance(await stores[0].reserve("b", [budget], whole(10), 60), Granted)
    assert await stores[0].settle("a", tokens(1))


async def test_connections_that_the_server_closed_fail_nobody(
    stores: tuple[RedisQuotaStore, RedisQuotaStore], redis_url: str
) -> None:
    store, _ = stores
    budget = limit(amount=1_000)

    async def ask_at_once() -> None:
        await asyncio.gather(*(store.states([budget]) for _ in range(10)))

    await ask_at_once()
    with redis.Redis.from_url(redis_url) as other:
        assert other.client_kill_filter(_type="normal", skipme=True) >= 10
    for _ in range(3):  # what the kernel knows, the loop hears
        await asyncio.sleep(0)
    await ask_at_once()


async def test_a_server_that_is_down_refuses_everything_and_one_that_forgot_waits_to_be_filled() -> None:
    server = services.start_redis()
    store, other = RedisQuotaStore(server.url, timeout_s=10), RedisQuotaStore(server.url, timeout_s=10)
    budget = limit(amount=100)

    operations: list[Callable[[], Awaitable[object]]] = [
        lambda: store.reserve("b", [budget], whole(10), 60),
        lambda: store.settle("a", tokens(1)),
        lambda: store.top_up("a", tokens(1), tokens(2), tokens(2)),
        lambda: store.renew(["a"], 60),
        store.expire,
        store.overdue,
        lambda: store.states([budget]),
        store.ping,
    ]
    rebuilding: list[Callable[[], Awaitable[object]]] = [
        lambda: store.rebuild([(budget, 1)]),
        lambda: store.begin_rebuild("me", 60),
        lambda: store.finish_rebuild("me", "e"),
    ]
    try:
        await filled(store)
        await store.reserve("a", [budget], whole(10), 60)
        server.kill()
        for operation in [*operations, *rebuilding]:
            with pytest.raises(QuotaStoreUnavailable) as caught:
                await operation()
            assert "127.0.0.1" not in str(caught.value)
        server.start()
        # Its counters are gone: to go on from zero would give the budget out a second time.
        for operation in [*operations, rebuilding[0]]:
            with pytest.raises(QuotaStoreRecovering, match="rebuilt"):
                await operation()
        # Exactly one of several gateways fills them.
        won = await asyncio.gather(store.begin_rebuild("one", 60), other.begin_rebuild("two", 60))
        assert sorted(won) == [False, True]
        winner, name = (store, "one") if won[0] else (other, "two")
        for operation in operations:
            with pytest.raises(QuotaStoreRecovering):
                await operation()
        await winner.rebuild([(budget, 95)])
        await winner.finish_rebuild(name, "second")
        assert not await store.begin_rebuild("late", 60)
        assert isinstance(await store.reserve("b", [budget], whole(10), 60), Denied)
        assert isinstance(await store.reserve("c", [budget], whole(5), 60), Granted)
        assert store.epoch == "second"
    finally:
        await store.close()
        await other.close()
        server.stop()


OPERATIONS = ["reserve", "settle", "top_up", "renew", "expire", "overdue", "states", "ping", "rebuild"]


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_a_server_that_comes_back_with_an_old_copy_of_its_data_is_rebuilt_once(operation: str) -> None:
    server = services.start_redis()
    store, other = RedisQuotaStore(server.url, timeout_s=10), RedisQuotaStore(server.url, timeout_s=10)
    budget = limit(amount=100)
    attempts: dict[str, Callable[[], Awaitable[object]]] = {
        "reserve": lambda: store.reserve("d", [budget], whole(10), 60),
        "settle": lambda: store.settle("a", tokens(1)),
        "top_up": lambda: store.top_up("a", tokens(1), tokens(2), tokens(2)),
        "renew": lambda: store.renew(["a"], 60),
        "expire": store.expire,
        "overdue": store.overdue,
        "states": lambda: store.states([budget]),
        "ping": store.ping,
        "rebuild": lambda: store.rebuild([(budget, 1)]),
    }
    try:
        await filled(store)
        for each in (store, other):
            assert isinstance(await each.reserve("a", [budget], whole(10), 60), Granted)
        with redis.Redis.from_url(server.url) as client:
            client.save()
            await store.reserve("b", [budget], whole(80), 60)
            await store.settle("b", tokens(80))
            server.kill()
            server.start()
            # All of it is there, and of the right epoch; only what was settled since then is not.
            assert client.hget("fairgate:registry", "epoch") == b"first"
            assert client.hget("fairgate:{ten_a}:counters", "#epoch") == b"first"
        for attempt in (attempts[operation], lambda: other.reserve("c", [budget], whole(30), 60)):
            with pytest.raises(QuotaStoreUnavailable):
                await attempt()  # meets the connection that broke
            with pytest.raises(QuotaStoreRecovering):
                await attempt()
        assert await other.begin_rebuild("other", 60)
        with pytest.raises(QuotaStoreRecovering):
            await attempts[operation]()
        await other.rebuild([(budget, 80)])
        await other.finish_rebuild("other", "second")
        # The server is verified: no other rebuild is requested.
        for each in (store, other):
            assert [state.used for state in await each.states([budget])] == [80]
            await each.ping()
        assert not await store.begin_rebuild("late", 60)
        assert isinstance(await store.reserve("e", [budget], whole(21), 60), Denied)
    finally:
        await store.close()
        await other.close()
        server.stop()


@EVERYWHERE
@pytest.mark.parametrize(
    "operation", ["rebuild", "rebuild another", "restore", "finish", "finish with nothing"]
)
@pytest.mark.parametrize("is_finished", [False, True])
async def test_who_was_overtaken_in_rebuilding_can_neither_write_nor_finish(
    redis_url: str, operation: str, is_finished: bool
) -> None:
    clock, budget = Clock(), limit(amount=100)
    slow, quick = (
        RedisQuotaStore(redis_url, timeout_s=30, virtual_clock=clock),
        RedisQuotaStore(redis_url, timeout_s=30, virtual_clock=clock),
    )
    counter = "tenant:ten_a:total_tokens:lifetime/UTC:*@0"
    attempts: dict[str, Callable[[], Awaitable[object]]] = {
        "rebuild": lambda: slow.rebuild([(budget, 50)]),
        "rebuild another": lambda: slow.rebuild([(limit(tenant_id="ten_of_no_one_else"), 50)]),
        "restore": lambda: slow.restore("r", [budget], [counter], whole(5), tokens(0), 60),
        "finish": lambda: slow.finish_rebuild("slow", "slow"),
        "finish with nothing": lambda: slow.finish_rebuild("slow", "slow"),
    }
    used = [] if operation == "finish with nothing" else [(budget, 70)]
    assert await slow.begin_rebuild("slow", 5)
    clock.advance(5)
    assert await quick.begin_rebuild("quick", 5)
    await quick.rebuild(used)
    if is_finished:
        await quick.finish_rebuild("quick", "quick")
    with pytest.raises(QuotaStoreRecovering):
        await attempts[operation]()
    if not is_finished:
        await quick.finish_rebuild("quick", "quick")
    [state] = await slow.states([budget])
    assert (state.used, state.held) == (70 if used else 0, 0)
    await quick.ping()
    assert quick.epoch == "quick"
    for store in (slow, quick):
        await store.close()


@EVERYWHERE
@pytest.mark.parametrize(
    "operation", ["reserve", "top_up", "settle", "renew", "expire", "overdue", "states", "rebuild"]
)
async def test_one_tenants_loss_stops_everything_until_all_is_rebuilt(
    stores: tuple[RedisQuotaStore, RedisQuotaStore], redis_url: str, operation: str
) -> None:
    """(A node of a cluster can lose what is on it, and no more.)"""
    noticing, other = stores
    mine, others = limit(amount=100), limit(amount=100, tenant_id="ten_b")
    for budget in (mine, others):
        for store in stores:
            await store.reserve(f"of-{budget.tenant_id}", [budget], whole(10), 60)
    attempts: dict[str, Callable[[], Awaitable[object]]] = {
        "reserve": lambda: noticing.reserve("r", [mine], whole(10), 60),
        "top_up": lambda: noticing.top_up("of-ten_a", tokens(1), tokens(20), tokens(20)),
        "settle": lambda: noticing.settle("of-ten_a", tokens(1)),
        "renew": lambda: noticing.renew(["of-ten_a"], 60),
        "expire": noticing.expire,
        "overdue": noticing.overdue,
        "states": lambda: noticing.states([mine]),
        "rebuild": lambda: noticing.rebuild([(mine, 1)]),
    }
    with services.open_redis(redis_url) as client:
        client.delete("fairgate:{ten_a}:counters", "fairgate:{ten_a}:holds", "fairgate:{ten_a}:leases")
    with pytest.raises(QuotaStoreRecovering):
        await attempts[operation]()
    assert await noticing.begin_rebuild("me", 60)
    with pytest.raises(QuotaStoreRecovering):
        await other.reserve("r", [others], whole(10), 60)
    await noticing.rebuild([(mine, 90), (others, 80)])
    await noticing.finish_rebuild("me", "second")
    states = await other.states([mine, others])
    assert [(state.used, state.held) for state in states] == [(90, 0), (80, 0)]


async def test_a_loss_that_was_repaired_meanwhile_is_not_declared_again(
    stores: tuple[RedisQuotaStore, RedisQuotaStore],
) -> None:
    budget = limit(amount=100)
    await stores[0].reserve("a", [budget], whole(10), 60)
    await stores[0]._registry.lose("an epoch long ago")
    assert isinstance(await stores[1].reserve("b", [budget], whole(10), 60), Granted)


@EVERYWHERE
async def test_a_new_tenant_begins_with_nothing_while_others_go_on(
    stores: tuple[RedisQuotaStore, RedisQuotaStore],
) -> None:
    budgets = [limit(amount=100, tenant_id=f"ten_{index}") for index in range(10)]
    answers = await asyncio.gather(
        *(
            store.reserve(f"r{number}-{budget.tenant_id}", [budget], whole(10), 60)
            for budget in budgets
            for number, store in enumerate(stores)
        )
    )
    assert all(isinstance(answer, Granted) for answer in answers)
    assert [state.held for state in await stores[0].states(budgets)] == [20] * 10


async def test_holding_and_settling_take_two_round_trips_and_each_top_up_one(
    stores: tuple[RedisQuotaStore, RedisQuotaStore],
) -> None:
    store, _ = stores
    limits = [
        limit(amount=10_000),
        limit(amount=1_000, window=Window.MINUTE),
        limit(amount=500, rate_per_s=100),
        limit(Meter.CONCURRENCY, amount=5),
        limit(Meter.COST_NANOUSD, amount=5, mode=LimitMode.SHADOW),
        on_user("amy", amount=9_000),
        on_platform(amount=9_000),
    ]

    async def one(request_id: str, top_ups: int) -> int:
        before = store.round_trips
        await store.reserve(request_id, limits, stepwise(10, 20, 90), 60)
        for number in range(top_ups):
            more = tokens(11 + number)
            assert isinstance(await store.top_up(request_id, tokens(10 + number), more, more), Granted)
        assert await store.settle(request_id, tokens(10))
        return store.round_trips - before

    await one("warm", 1)
    assert [await one(f"r{count}", count) for count in (0, 1, 7)] == [2, 3, 9]
    before = store.round_trips
    assert isinstance(await store.reserve("no", limits, whole(10_001), 60), Denied)
    assert store.round_trips == before + 1


@EVERYWHERE
async def test_five_hundred_at_once_over_four_gateways_never_exceed_platform_model_or_end_user(
    redis_url: str,
) -> None:
    gateways = [RedisQuotaStore(redis_url, timeout_s=30) for _ in range(4)]
    await filled(gateways[0])
    everyone, model = on_platform(amount=900), on_platform(Meter.REQUESTS, amount=10, model="large")
    users = {
        tenant_id: [on_user(f"{tenant_id}{number}", amount=250, tenant_id=tenant_id) for number in range(2)]
        for tenant_id in ("ten_a", "ten_b")
    }
    every = [everyone, model, *users["ten_a"], *users["ten_b"]]
    spent: Counter[str] = Counter()
    bound = set()

    async def one(index: int) -> None:
        store, request_id = gateways[index % 4], f"r{index}"
        user = users["ten_a" if index % 3 else "ten_b"][index // 3 % 2]
        limits = [user, everyone, *([] if index % 5 else [model])]
        answer = await store.reserve(request_id, limits, whole(13), 60)
        if isinstance(answer, Denied):
            bound.add((answer.limit.kind, answer.limit.model))
            return
        for state in answer.states:
            assert state.used + state.held <= state.limit.amount
        assert await gateways[(index + 1) % 4].settle(request_id, tokens(11))
        for limit_ in limits:
            spent[limit_.identity] += 1 if limit_.meter is Meter.REQUESTS else 11

    await asyncio.gather(*map(one, range(500)))
    states = await gateways[3].states(every)
    assert [(state.used, state.held) for state in states] == [(spent[each.identity], 0) for each in every]
    assert all(state.used <= state.limit.amount for state in states)
    kinds = SubjectKind.PLATFORM, SubjectKind.END_USER
    assert bound == {(kinds[0], None), (kinds[0], "large"), (kinds[1], None)}
    for store in gateways:
        await store.close()


async def test_end_users_that_give_way_leave_nothing_behind(redis_url: str) -> None:
    clock = Clock()
    store = RedisQuotaStore(redis_url, timeout_s=30, virtual_clock=clock, max_end_users=5)
    await filled(store)
    for number in range(50):
        user = [on_user(f"u{number}", window=Window.MINUTE), on_user(f"u{number}", amount=10, rate_per_s=1)]
        assert isinstance(await store.reserve(f"r{number}", user, whole(2), 60), Granted)
        await store.settle(f"r{number}", tokens(1))
        clock.advance(13)
    with redis.Redis.from_url(redis_url) as client:
        sizes = [client.hlen("fairgate:{ten_a}:counters"), client.hlen("fairgate:{ten_a}:users")]
        # Two counters each, the epoch, the attempt, and when the last that was dropped had come to rest.
        assert sizes == [5 * 2 + 3, 5]
        assert client.zcard("fairgate:{ten_a}:resting") == 5
    await store.close()


async def test_a_cluster_takes_every_operation() -> None:
    server = services.start_cluster(1, 0).nodes[0]
    store = RedisQuotaStore(server.url.replace("redis://", "redis+cluster://"), timeout_s=10)
    alone = RedisQuotaStore(server.url, timeout_s=10)
    everyone, all_running = on_platform(amount=70), on_platform(Meter.CONCURRENCY, amount=3)
    limits = [limit(amount=100), limit(amount=50, rate_per_s=1), limit(Meter.CONCURRENCY, amount=2)]
    others = limit(amount=100, tenant_id="ten_b")
    try:
        await filled(store)
        assert isinstance(await store.reserve("a", limits, stepwise(10, 20, 60), 60), Granted)
        assert isinstance(await store.reserve("b", [others], whole(10), 60), Granted)
        assert isinstance(await store.top_up("a", tokens(10), tokens(20), tokens(30)), Granted)
        later = limit(Meter.OUTPUT_TOKENS, amount=90)
        rebound = await store.rebind("a", [*limits, later], stepwise(20, 20, 60), tokens(10), must_fit=True)
        assert isinstance(rebound, Granted)
        await store.renew(["a", "b"], 90)
        assert await store.overdue() == []
        assert await store.expire() == []
        assert await store.settle("a", tokens(20))
        await store.give_back(store.epoch, [later], rebound.charged_to, tokens(5))
        assert [state.used for state in await store.states([later])] == [15]
        await store.rebuild([(limits[0], 30), (others, 40)])
        states = await store.states([limits[0], others])
        assert [(state.used, state.held) for state in states] == [(30, 0), (40, 10)]
        # A running request comes under limits on the platform, where there is room.
        for amount, kind in ((9, Denied), (70, Granted)):
            shared = [on_platform(amount=amount), all_running]
            bound = await store.rebind(
                "b", [shared[0], others, shared[1]], whole(10), tokens(0), must_fit=True
            )
            assert isinstance(bound, kind)
            assert [state.limit for state in bound.states] == [shared[0], others, shared[1]]
        assert isinstance(await store.reserve("c", [*limits, everyone], whole(61), 60), Denied)
        assert [state.held for state in await store.states([everyone, all_running, others])] == [10, 1, 10]
        assert [state.held for state in await store.states(limits)] == [0, 0, 0]
        assert isinstance(await store.reserve("d", [on_user("amy")], whole(10), 60), Granted)
        assert await store.end_users("ten_a") == 1
        with redis.Redis.from_url(server.url) as client:
            assert client.info("cluster")["cluster_enabled"] == 1
            slots = {client.cluster("KEYSLOT", key) for key in client.keys("fairgate:{ten_b}:*")}
            assert len(slots) == 1
            # Scripts that reach beyond their slot are refused there, so all of them were tried.
            with pytest.raises(redis.ResponseError, match="same slot"):
                client.eval("return 1", 2, "fairgate:{ten_a}:holds", "fairgate:{ten_b}:holds")
            client.flushall()
        with pytest.raises(Invalid, match=r"redis_url: 127\S+ is a node of a Redis Cluster: write redis\+"):
            await alone.ping()
        assert await store.begin_rebuild("me", 60)
        await store.rebuild([(limits[0], 30)])
        charged_to = ["tenant:ten_a:total_tokens:lifetime/UTC:*@0"]
        await store.restore("c", limits[:1], charged_to, whole(10), tokens(5), 60)
        await store.finish_rebuild("me", "second")
        [state] = await store.states(limits[:1])
        assert (state.used, state.held) == (30, 10)
    finally:
        await alone.close()
        await store.close()
        server.stop()


async def test_a_tenants_keys_share_one_slot_and_nothing_else_is_touched(
    stores: tuple[RedisQuotaStore, RedisQuotaStore], redis_url: str
) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.set("fairgate-other", "kept")
        await stores[0].reserve("a", [limit(amount=100)], whole(10), 60)
        await stores[0].reserve("free", [], whole(10), 60)
        await stores[0].settle("a", tokens(10))
        keys = {key.decode() for key in client.keys("fairgate*")}
        assert keys == {
            "fairgate-other",
            "fairgate:{platform}:counters",
            "fairgate:registry",
            "fairgate:server",
            "fairgate:{ten_a}:counters",
            "fairgate:{-}:counters",
            "fairgate:{-}:holds",
            "fairgate:{-}:leases",
        }
        assert client.get("fairgate-other") == b"kept"


def test_only_commands_of_redis_6_2_are_used() -> None:
    known = {"TIME", "DEL", "HGET", "HSET", "HSETNX", "HDEL", "HEXISTS", "ZADD", "ZREM", "ZRANGEBYSCORE"}
    known |= {"HLEN", "ZRANGE", "SET"}
    used = set()
    for script in LUA.glob("*.lua"):
        used |= set(re.findall(r"redis\.call\('(\w+)'", script.read_text()))
    assert used == known


@pytest.mark.parametrize("url", ["", "localhost:6379", "http://localhost"])
def test_a_url_that_cannot_be_used_is_refused_by_name(url: str) -> None:
    with pytest.raises(Invalid, match="redis_url"):
        RedisQuotaStore(url)


async def test_the_store_runs_on_every_redis_found_here() -> None:
    binaries = services.redis_binaries()
    assert binaries
    for binary in binaries:
        server = services.start_redis(binary)
        store = RedisQuotaStore(server.url, timeout_s=10)
        budget = limit(amount=9_000_000_000_000_000, window=Window.MONTH)
        try:
            await filled(store)
            await store.ping()
            await store.reserve("a", [budget], whole(2_000_000_000_000_001), 60)
            await store.renew(["a"], 90)
            total = tokens(4_000_000_000_000_001)
            await store.top_up("a", tokens(0), total, total)
            await store.settle("a", tokens(4_000_000_000_000_001))
            assert await store.expire() == []
            assert [state.used for state in await store.states([budget])] == [4_000_000_000_000_001]
        finally:
            await store.close()
            server.stop()
