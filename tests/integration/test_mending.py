"""Rebuild of lost Redis counters under several gateways: once, completely, and before anything is admitted.

Two gateways' holds on one ledger and one private Redis that loses all data in the middle of their work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import redis

from engine.messages import SamplingParams
from gateway.budget.holds import BudgetDenied, Holds
from gateway.domain.call import Call
from tenants.ledger.ledger import Ledger
from tenants.ledger.verify import verify_ledger
from tenants.outcomes import RequestOutcome
from tenants.quota.redis import RedisQuotaStore
from tenants.quota.store import Granted, Hold, QuotaStoreUnavailable
from tenants.storage.database import Database
from tenants.types import PLATFORM, Amounts, Limit, Meter, Principal, SubjectKind, Tier, Window
from tests.support import services
from tests.support.builders import site
from tests.support.clusters import node_of, one_tenant_each

PROMPT = [1, 2, 3, 4, 5]
BUDGET = Limit("lim", "ten", SubjectKind.TENANT, "ten", Meter.TOTAL_TOKENS, 10_000, Window.LIFETIME)
BUCKET = Limit("buc", "ten", SubjectKind.KEY, "key", Meter.OUTPUT_TOKENS, 40, rate_per_s=0.001)
LIMITS = [BUDGET, BUCKET]
HOLD = Hold(Amounts(5, 5, 0, 1), Amounts(5, 10, 0, 1), Amounts(5, 100, 0, 1))


@pytest.fixture(scope="module")
def redis_service() -> Iterator[services.Service]:
    service = services.start_redis()
    yield service
    service.stop()


@dataclass
class Gateway:
    """One gateway's books and its connection to Redis."""

    name: str
    store: RedisQuotaStore
    holds: Holds
    requests: int = 0

    def call(self, *limits: Limit) -> Call:
        self.requests += 1
        tenant_id = (limits or LIMITS)[0].tenant_id
        principal = Principal(
            tenant_id, "acme", "prj", "key", "fg_live_x", 1.0, frozenset({"inference"}), Tier.STANDARD,
            frozenset(Tier), None, limits or (BUDGET,),
        )  # fmt: skip
        return Call(
            request_id=f"req_{self.name}_{self.requests}", chat=True, model="m", principal=principal,
            tier=Tier.STANDARD, prompts=(PROMPT,), choices=1, max_tokens=100, sampling=SamplingParams(),
            stream=True, include_usage=True, created=1,
        )  # fmt: skip

    async def admitted(self, *limits: Limit) -> Call:
        """A request that was admitted, once the store is right again."""
        async with asyncio.timeout(30):
            while True:
                call = self.call(*limits)
                with contextlib.suppress(QuotaStoreUnavailable):
                    await self.holds.reserve(call, HOLD)
                    return call
                await asyncio.sleep(0.01)

    async def settle(self, call: Call, output_tokens: int) -> None:
        amounts = Amounts(5, output_tokens, 0, 1)
        settlement = self.holds.settle(call, amounts, RequestOutcome.COMPLETED, {}, lambda: None)
        assert await settlement.within(30)


@pytest.fixture
async def house(
    database: Database, redis_service: services.Service
) -> AsyncIterator[tuple[Gateway, Gateway]]:
    redis.Redis.from_url(redis_service.url).flushall()
    async with two_gateways(database, redis_service.url, LIMITS, 10) as made:
        yield made


@contextlib.asynccontextmanager
async def two_gateways(
    database: Database, url: str, limits: list[Limit], timeout_s: float
) -> AsyncIterator[tuple[Gateway, Gateway]]:
    made = []
    for name in ("a", "b"):
        store = RedisQuotaStore(url, timeout_s=timeout_s)
        here = site(database, lambda: 1e9, gateway_id=name)
        holds = Holds(here, Ledger(database), store, all_limits=lambda: limits)
        made.append(Gateway(name, store, holds))
    await made[0].holds.fill(is_new=False)
    for each in made:
        each.holds.start()
    yield made[0], made[1]
    for each in made:
        await each.holds.close(5)
        await each.store.close()


async def test_lost_counters_are_filled_once_with_what_was_settled_and_what_runs(
    house: tuple[Gateway, Gateway], database: Database, redis_service: services.Service
) -> None:
    a, b = house
    for gateway in house:
        done = gateway.call()
        await gateway.holds.reserve(done, HOLD)
        await gateway.settle(done, 7)
    running, stream = a.call(), b.call(BUDGET, BUCKET)
    await a.holds.reserve(running, HOLD)
    assert (await b.holds.reserve(stream, HOLD)).covered == Amounts(5, 5, 0, 1)
    used, ahead = Amounts(5, 4, 0, 1), Amounts(5, 20, 0, 1)
    assert isinstance(await b.holds.top_up(stream.request_id, used, ahead, ahead), Granted)
    before = await Ledger(database).epoch()
    redis.Redis.from_url(redis_service.url).flushall()
    first = a.call()
    with pytest.raises(QuotaStoreUnavailable):
        await a.holds.reserve(first, HOLD)
    assert a.holds.is_recovering
    await asyncio.gather(a.admitted(), b.admitted())
    after = await Ledger(database).epoch()
    assert int(after) == int(before) + 1, "one rebuild for two gateways"
    assert a.store.epoch == b.store.epoch == after
    window, bucket = await a.store.states(LIMITS)
    # Two that ran, one that runs, two that were admitted since, and the stream with its top-up.
    assert (window.used, window.held) == (2 * 12, 15 + 2 * 15 + 25)
    assert (bucket.used, bucket.held) == (40, 16), "the bucket of a running stream is filled in empty"
    assert (await verify_ledger(database, a.store, running=a.holds.live | b.holds.live)).problems == ()
    # It goes on where it was: the repeated top-up changes nothing, and nothing is settled twice.
    await b.holds.top_up(stream.request_id, used, ahead, ahead)
    await b.settle(stream, 18)
    await a.settle(running, 9)
    [window] = await b.store.states([BUDGET])
    assert (window.used, window.held) == (2 * 12 + 23 + 14, 2 * 15)


async def test_whatever_settles_or_begins_while_they_are_filled_is_counted_once(
    house: tuple[Gateway, Gateway], database: Database, redis_service: services.Service
) -> None:
    client = redis.Redis.from_url(redis_service.url)
    rebuilds_before = int(await Ledger(database).epoch())
    charged = 0

    async def one(gateway: Gateway, output_tokens: int) -> None:
        nonlocal charged
        call = await gateway.admitted()
        more = Amounts(5, 30, 0, 1)
        async with asyncio.timeout(30):
            while True:
                try:
                    await gateway.holds.top_up(call.request_id, Amounts(5, 1, 0, 1), more, more)
                    break
                except QuotaStoreUnavailable:
                    await asyncio.sleep(0.01)
        await gateway.settle(call, output_tokens)
        charged += 5 + output_tokens

    for round_ in range(12):
        requests = [one(gateway, 1 + index) for gateway in house for index in range(6)]
        working = asyncio.gather(*requests)
        for _ in range(round_):  # each round it is lost a little later
            await asyncio.sleep(0.004)
        await asyncio.to_thread(client.flushall)
        await working
    for gateway in house:
        await gateway.admitted()
    [window] = await house[0].store.states([BUDGET])
    assert (window.used, window.held) == (charged, 2 * 15)
    assert int(await Ledger(database).epoch()) - rebuilds_before >= 6, "the case was met"
    live = house[0].holds.live | house[1].holds.live
    assert (await verify_ledger(database, house[0].store, running=live)).problems == ()


async def test_a_budget_is_not_whole_again_after_it_was_lost(
    house: tuple[Gateway, Gateway], redis_service: services.Service
) -> None:
    a, b = house
    small = Limit("small", "ten", SubjectKind.PROJECT, "prj", Meter.REQUESTS, 3, Window.LIFETIME)
    LIMITS.append(small)
    try:
        for gateway in (a, b, a):
            await gateway.holds.reserve(gateway.call(small), HOLD)
        redis.Redis.from_url(redis_service.url).flushall()
        for gateway in (a, b):
            with pytest.raises(BudgetDenied):
                await gateway.admitted(small)
    finally:
        LIMITS.remove(small)


async def test_a_redis_restored_from_an_old_dump_gives_nothing_out_a_second_time(
    house: tuple[Gateway, Gateway], database: Database, redis_service: services.Service
) -> None:
    rebuilds_before = int(await Ledger(database).epoch())
    client = redis.Redis.from_url(redis_service.url)
    charged = 0
    for output_tokens in (7, 8, 9):
        for gateway in house:
            call = gateway.call()
            await gateway.holds.reserve(call, HOLD)
            await gateway.settle(call, output_tokens)
            charged += 5 + output_tokens
        if output_tokens == 7:
            client.save()
    redis_service.kill()
    redis_service.start()
    for gateway in house:
        await gateway.admitted()
    [window] = await house[0].store.states([BUDGET])
    assert (window.used, window.held) == (charged, 2 * 15)
    assert int(await Ledger(database).epoch()) == rebuilds_before + 1, "noticed, and filled once"


async def comes(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while True:
            if is_so():
                return
            await asyncio.sleep(0.01)


@pytest.mark.long
async def test_a_masters_death_under_load_stops_its_own_tenants_only_and_the_books_agree(
    database: Database,
) -> None:
    cluster = services.start_cluster()
    taken = {node_of(cluster, tag).url for tag in ("registry", "platform")}
    budgets = {
        url: replace(BUDGET, tenant_id=each.tenant_id, subject_id=each.tenant_id, amount=10_000_000)
        for url, each in one_tenant_each(cluster).items()
    }
    lost = next(node for node in cluster.nodes if node.url in budgets and node.url not in taken)
    replica = cluster.nodes[cluster.nodes.index(lost) + cluster.masters]
    everyone = Limit(
        "all", PLATFORM, SubjectKind.PLATFORM, PLATFORM, Meter.TOTAL_TOKENS, 10**9, Window.LIFETIME
    )
    paths = [(budget, everyone) for budget in budgets.values()]
    served = dict.fromkeys(budgets, 0)
    refused: list[str] = []
    is_over = False

    async def requests(gateway: Gateway, url: str) -> None:
        while not is_over:
            call = gateway.call(budgets[url], everyone)
            try:
                await gateway.holds.reserve(call, HOLD)
            except QuotaStoreUnavailable as error:
                if url != lost.url and not has_taken_over():
                    refused.append(str(error))
                await asyncio.sleep(0.01)
                continue
            await gateway.settle(call, 7)
            served[url] += 1

    def has_taken_over() -> bool:
        with redis.Redis.from_url(replica.url) as client:
            return client.info("replication")["role"] == "master"

    try:
        async with two_gateways(database, cluster.url, [*budgets.values(), everyone], 1) as house:
            epoch = int(await Ledger(database).epoch())
            load = [asyncio.create_task(requests(each, url)) for each in house for url in budgets]
            await comes(lambda: min(served.values()) > 20)
            lost.kill()
            before = dict(served)
            await comes(has_taken_over)
            assert all(served[url] > before[url] + 20 for url in budgets if url != lost.url)
            assert refused == []
            await comes(lambda: all(each.store.epoch != str(epoch) for each in house))
            await asyncio.gather(*(each.admitted(*path) for each in house for path in paths))
            is_over = True
            await asyncio.gather(*load)
            assert int(await Ledger(database).epoch()) == epoch + 1, "one rebuild for both"
            running = house[0].holds.live | house[1].holds.live
            report = await verify_ledger(database, house[0].store, running=running)
            assert report.problems == ()
            states = await house[0].store.states([*budgets.values(), everyone])
            # Each has its prompt and seven tokens; those that were admitted at the end hold still.
            assert [state.used for state in states] == [
                *(12 * number for number in served.values()),
                12 * sum(served.values()),
            ]
            assert [state.held for state in states] == [2 * 15] * 3 + [6 * 15]
    finally:
        cluster.stop()
