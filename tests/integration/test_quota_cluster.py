"""RedisQuotaStore in a Redis Cluster that loses masters, forgets, or moves its slots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from typing import TypeVar

import pytest
from redis.crc import key_slot

from tenants.quota.redis import RedisQuotaStore
from tenants.quota.store import Denied, Granted, QuotaNodeUnavailable, QuotaStoreRecovering
from tenants.types import Amounts, Limit, Meter
from tests.support import services
from tests.support.clusters import node_of, one_tenant_each
from tests.support.quota import filled, limit, on_platform, whole
from tests.support.services import Cluster

pytestmark = pytest.mark.long

T = TypeVar("T")
Open = Callable[[Cluster], RedisQuotaStore]


def tokens(count: int) -> Amounts:
    return Amounts(output_tokens=count)


async def once_it_answers(ask: Callable[[], Awaitable[T]]) -> T:
    while True:
        try:
            return await ask()
        except QuotaNodeUnavailable:
            continue


async def spend(store: RedisQuotaStore, request_id: str, limits: list[Limit], count: int) -> bool:
    answer = await store.reserve(request_id, limits, whole(count), 60)
    return isinstance(answer, Granted) and await store.settle(request_id, tokens(count))


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    async with AsyncExitStack() as closing:

        def open_store(cluster: Cluster) -> RedisQuotaStore:
            store = RedisQuotaStore(cluster.url, timeout_s=1)
            closing.push_async_callback(store.close)
            return store

        yield open_store


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    started = services.start_cluster()
    yield started
    started.stop()


async def test_the_replica_of_a_dead_master_admits_nothing_until_all_is_rebuilt_once(
    cluster: Cluster, opened: Open
) -> None:
    stores = opened(cluster), opened(cluster)
    budgets = one_tenant_each(cluster)
    url, mine = list(budgets.items())[-1]
    others = [each for at, each in budgets.items() if at != url]
    await filled(stores[0])
    for budget in budgets.values():
        assert all([await spend(store, "r", [budget], 30) for store in stores])
    lost = next(node for node in cluster.nodes if node.url == url)
    lost.kill()
    refused = asyncio.create_task(stores[0].reserve("lost", [mine], whole(1), 60))
    served = 0
    while node_of(cluster, mine.tenant_id) is lost:
        for store in stores:
            for each in others:
                assert isinstance(await store.reserve(f"r{served}", [each], whole(1), 60), Granted)
                assert await store.settle(f"r{served}", tokens(0))
        served += 1
    assert served > 1
    with pytest.raises((QuotaNodeUnavailable, QuotaStoreRecovering)):
        await refused
    # Whether the replica has the last changes of the counters cannot be known.
    for store in stores:
        with pytest.raises(QuotaStoreRecovering):
            await once_it_answers(partial(store.reserve, "s", [mine], whole(1), 60))
    won = [await once_it_answers(partial(store.begin_rebuild, str(id(store)), 60)) for store in stores]
    assert won == [True, False]
    await stores[0].rebuild([(each, 60) for each in budgets.values()])
    await stores[0].finish_rebuild("", "second")
    for store in stores:
        await store.ping()
        for number, each in enumerate(budgets.values()):
            assert isinstance(await store.reserve(f"t{number}", [each], whole(41), 60), Denied)
        assert not await store.begin_rebuild("late", 60)
        assert store.epoch == "second"


@pytest.mark.parametrize("what", ["the registry", "a tenant"])
async def test_a_master_that_comes_back_empty_gives_nothing_out_a_second_time(
    opened: Open, what: str
) -> None:
    cluster = services.start_cluster(replicas=0)
    try:
        noticing, other = opened(cluster), opened(cluster)
        budgets = one_tenant_each(cluster)
        url, mine = list(budgets.items())[0 if what == "the registry" else -1]
        elsewhere = next(
            each for at, each in budgets.items() if at not in (url, node_of(cluster, "registry").url)
        )
        await filled(noticing)
        for budget in budgets.values():
            assert await spend(noticing, "r", [budget], 90)
            assert isinstance(await other.reserve("s", [budget], whole(1), 60), Granted)
        emptied = next(node for node in cluster.nodes if node.url == url)
        emptied.kill()
        emptied.start()
        with pytest.raises(QuotaStoreRecovering):
            await once_it_answers(partial(noticing.reserve, "t", [mine], whole(1), 60))
        assert isinstance(await other.reserve("t", [elsewhere], whole(1), 60), Granted), "served meanwhile"
        assert await once_it_answers(partial(noticing.begin_rebuild, "me", 60))
        # Also a tenant that the lost registry no longer lists is fenced.
        with pytest.raises(QuotaStoreRecovering):
            await other.reserve("u", [elsewhere], whole(1), 60)
        await noticing.rebuild([(budget, 90) for budget in budgets.values()])
        await noticing.finish_rebuild("me", "second")
        for store in (noticing, other):
            states = await once_it_answers(partial(store.states, list(budgets.values())))
            assert [(state.used, state.held) for state in states] == [(90, 0)] * 3
            await store.ping()
            assert not await store.begin_rebuild("late", 60)
    finally:
        cluster.stop()


async def test_slots_move_under_load_and_every_request_is_counted_once(
    cluster: Cluster, opened: Open
) -> None:
    stores = opened(cluster), opened(cluster)
    mine = [limit(amount=1_000_000), limit(Meter.CONCURRENCY, amount=12), on_platform(amount=1_000_000)]
    await filled(stores[0])
    settled, is_over = 0, False

    async def requests(worker: int) -> None:
        nonlocal settled
        number = 0
        while not is_over:
            store, name = stores[worker % 2], f"r{worker}-{number}"
            held = await once_it_answers(partial(store.reserve, name, mine, whole(9), 60))
            if isinstance(held, Granted):
                await once_it_answers(partial(store.settle, name, tokens(7)))
                settled += 1
            number += 1

    def move() -> None:
        for tag in ("ten_a", "platform", "registry", "ten_a"):
            source = node_of(cluster, tag)
            target = next(node for node in cluster.nodes[:3] if node is not source)
            before = settled
            with cluster.moving(key_slot(tag.encode()), target):
                pass
            while settled < before + 50:
                pass

    load = [asyncio.create_task(requests(worker)) for worker in range(20)]
    await asyncio.to_thread(move)
    is_over = True
    await asyncio.gather(*load)
    states = await stores[1].states(mine)
    assert [(state.used, state.held) for state in states] == [(7 * settled, 0), (0, 0), (7 * settled, 0)]
    for store in stores:
        await store.ping()
    assert not await stores[0].begin_rebuild("late", 60), "nothing was lost"
