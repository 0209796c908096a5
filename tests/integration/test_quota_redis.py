"""Does the Redis store hold where the one in this process has nothing to fear: two gateways, a server that
dies, forgets its scripts or its counters, a clock that is not ours, clusters and other people's keys?"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

from tenants.errors import Invalid
from tenants.quota.redis import RedisQuotaStore
from tenants.quota.store import Denied, Granted, QuotaStoreUnavailable
from tenants.types import Amounts, Meter, Window
from tests import services
from tests.quota import limit

LUA = Path(__file__).parents[2] / "tenants" / "quota" / "lua"


def tokens(count: int) -> Amounts:
    return Amounts(output_tokens=count)


@pytest.fixture
async def stores(redis_url: str) -> AsyncIterator[tuple[RedisQuotaStore, RedisQuotaStore]]:
    """Two gateways on the server's own clock."""
    pair = RedisQuotaStore(redis_url, timeout_s=30), RedisQuotaStore(redis_url, timeout_s=30)
    yield pair
    for store in pair:
        await store.close()


async def test_two_gateways_together_never_exceed_a_hard_limit(
    stores: tuple[RedisQuotaStore, RedisQuotaStore],
) -> None:
    budget, running = limit(amount=1_000), limit(Meter.CONCURRENCY, amount=20)
    highest = 0

    async def one(index: int) -> int:
        nonlocal highest
        store = stores[index % 2]
        answer = await store.reserve(f"r{index}", [budget, running], tokens(60), 60)
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


async def test_a_restarted_gateway_settles_tops_up_and_renews_what_it_never_reserved(
    stores: tuple[RedisQuotaStore, RedisQuotaStore],
) -> None:
    dead, restarted = stores
    for tenant_id in ("ten_a", "ten_b", "ten_c"):
        await dead.reserve(f"of-{tenant_id}", [limit(amount=100, tenant_id=tenant_id)], tokens(50), 60)
    await restarted.renew(["of-ten_b", "nobody's"], 120)
    granted = await restarted.top_up("of-ten_b", Amounts(output_tokens=50, requests=0))
    assert isinstance(granted, Granted)
    assert granted.states[0].held == 100
    assert await restarted.settle("of-ten_b", tokens(99))
    assert not await restarted.settle("nobody's", tokens(1))
    assert not await dead.settle("of-ten_b", tokens(99))


async def test_the_servers_clock_counts_not_the_gateways(
    stores: tuple[RedisQuotaStore, RedisQuotaStore],
) -> None:
    # This gateway believes to be an hour ahead; its windows must be the server's all the same.
    wrong, right = stores
    wrong._server_ahead_us = 3_600_000_000
    minute = limit(amount=100, window=Window.MINUTE)
    first = await wrong.reserve("a", [minute], tokens(10), 60)
    second = await right.reserve("b", [minute], tokens(10), 60)
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    if first.charged_to == second.charged_to:  # unless a minute has just turned
        assert second.states[0].held == 20
    started = int(first.charged_to[0].rpartition("@")[2])
    assert 0 <= time.time() - started < 120


async def test_a_server_that_forgot_the_scripts_is_told_them_again(
    stores: tuple[RedisQuotaStore, RedisQuotaStore], redis_url: str
) -> None:
    budget = limit(amount=100)
    await stores[0].reserve("a", [budget], tokens(10), 60)
    with redis.Redis.from_url(redis_url) as client:
        client.script_flush()
    assert isinstance(await stores[0].reserve("b", [budget], tokens(10), 60), Granted)
    assert await stores[0].settle("a", tokens(1))


async def test_a_server_that_is_down_refuses_everything_and_one_that_forgot_is_not_trusted() -> None:
    server = services.start_redis()
    store = RedisQuotaStore(server.url, timeout_s=10)
    budget = limit(amount=100)
    try:
        await store.reserve("a", [budget], tokens(10), 60)
        server.kill()
        for attempt in (
            store.reserve("b", [budget], tokens(10), 60),
            store.settle("a", tokens(1)),
            store.top_up("a", tokens(1)),
            store.renew(["a"], 60),
            store.expire(),
            store.states([budget]),
            store.rebuild([(budget, 1)]),
            store.ping(),
        ):
            with pytest.raises(QuotaStoreUnavailable) as caught:
                await attempt
            assert "127.0.0.1" not in str(caught.value)
        server.start()
        await store.ping()
        # Its counters are gone: to go on from zero would give the budget out a second time.
        with pytest.raises(QuotaStoreUnavailable, match="rebuilt"):
            await store.reserve("b", [budget], tokens(10), 60)
        assert not await store.settle("a", tokens(1))
        await store.rebuild([(budget, 95)])
        assert isinstance(await store.reserve("b", [budget], tokens(10), 60), Denied)
        assert isinstance(await store.reserve("c", [budget], tokens(5), 60), Granted)
    finally:
        await store.close()
        server.stop()


async def test_a_tenants_keys_share_one_slot_and_nothing_else_is_touched(
    stores: tuple[RedisQuotaStore, RedisQuotaStore], redis_url: str
) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.set("fairgate-other", "kept")
        await stores[0].reserve("a", [limit(amount=100)], tokens(10), 60)
        await stores[0].reserve("free", [], tokens(10), 60)
        await stores[0].settle("a", tokens(10))
        keys = {key.decode() for key in client.keys("fairgate*")}
        assert keys == {
            "fairgate-other",
            "fairgate:tenants",
            "fairgate:{ten_a}:counters",
            "fairgate:{-}:counters",
            "fairgate:{-}:holds",
            "fairgate:{-}:leases",
        }
        assert client.get("fairgate-other") == b"kept"


def test_only_commands_of_redis_6_2_are_used() -> None:
    known = {"TIME", "HGET", "HSET", "HDEL", "HEXISTS", "ZADD", "ZREM", "ZRANGEBYSCORE"}
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
            await store.ping()
            await store.reserve("a", [budget], tokens(2_000_000_000_000_001), 60)
            await store.renew(["a"], 90)
            await store.top_up("a", Amounts(output_tokens=2_000_000_000_000_000, requests=0))
            await store.settle("a", tokens(4_000_000_000_000_001))
            assert await store.expire() == []
            assert [state.used for state in await store.states([budget])] == [4_000_000_000_000_001]
        finally:
            await store.close()
            server.stop()
