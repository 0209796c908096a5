"""Round trips of a shared queue, wake-ups between gateways, and waiting requests while Redis is away.

Real queues over a real Redis, beside the real quota store. No clock is asserted: only counts and order.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from engine.entry import QueueEntry
from engine.scheduling.policy import UnknownPolicy
from gateway.dispatch.redis_queue import RedisQueue
from gateway.flow.controller import Dispatch, QueueFull, Ticket
from gateway.flow.shared.codec import PoolRule
from gateway.flow.shared.mirror import Mirror
from gateway.flow.shared.protocol import PoolSession
from gateway.flow.window import Replica
from gateway.pools.peer_requests import PeerRequests
from gateway.pools.request_actions import NOT_HERE, SHOW, RequestAction
from ops.serving import doctor
from ops.settings.settings import Settings
from tenants.quota.redis import RedisQuotaStore
from tenants.quota.store import Granted, QuotaStoreUnavailable
from tenants.types import Amounts
from tests.support import services
from tests.support.builders import flow_controller
from tests.support.engine_process import DEADLINE_S, until
from tests.support.quota import filled, limit, stepwise, whole

BUDGET = limit(amount=10_000_000)
_lives = itertools.count(1)


class Gateway:
    """One gateway's queue, and the turns that it was told of."""

    def __init__(
        self, url: str, name: str, places: int, *, may_go_alone: bool = False, max_queued: int = 1000
    ) -> None:
        mirror = flow_controller(kind=Mirror)
        # No gateway beats or is buried while a test runs.
        rule = PoolRule.of(replace(mirror.settings, max_queued=max_queued), 3600 * 10**6)
        session = PoolSession(mirror, rule, next(_lives) * 1000)
        self.queue = RedisQueue(url, "pool", name, session, time.monotonic, may_go_alone=may_go_alone)
        self.replicas = [Replica("a", places, 100_000)]
        self.turns: list[str] = []
        self.refused: list[str] = []

    def start(self) -> None:
        self.queue.bind(lambda: self.replicas, self._on_turns, self._on_refused)
        self.queue.start()

    def _on_turns(self, turns: list[Dispatch]) -> None:
        self.turns += [turn.ticket.entry.entry_id for turn in turns]

    def _on_refused(self, entry_id: str, full: QueueFull) -> None:
        self.refused.append(entry_id)

    def arrive(self, name: str, tenant: str = "one") -> None:
        now_s = time.monotonic()
        assert self.queue.enqueue(Ticket(QueueEntry(name, tenant, now_s, 10, 10), 1, 20), now_s) is None
        self.queue.pump(now_s)

    def finish(self, name: str) -> None:
        self.queue.finish(name, 10, 10, time.monotonic())
        self.queue.pump(time.monotonic())

    async def has_turns(self, count: int) -> None:
        await until(lambda: len(self.turns) >= count)


@asynccontextmanager
async def running(*gateways: Gateway) -> AsyncIterator[None]:
    """All have joined, and listen."""
    for gateway in gateways:
        gateway.start()
    try:
        await until(lambda: all(each.queue.is_listening and each.queue.belongs for each in gateways))
        yield
    finally:
        for gateway in gateways:
            await gateway.queue.close()


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[RedisQuotaStore]:
    made = RedisQuotaStore(redis_url, timeout_s=10)
    await filled(made)
    yield made
    await made.close()


async def one_request(gateway: Gateway, store: RedisQuotaStore, name: str, top_ups: int = 0) -> None:
    """The whole way of a request through Redis."""
    assert isinstance(await store.reserve(name, [BUDGET], stepwise(5, 5, 90), 60), Granted)
    gateway.arrive(name)
    await until(lambda: name in gateway.turns)
    for number in range(top_ups):
        gateway.queue.progress(name, 11 + number, 1)
        more = Amounts(output_tokens=6 + number)
        assert isinstance(await store.top_up(name, Amounts(), more, more), Granted)
    gateway.finish(name)
    assert await store.settle(name, Amounts(output_tokens=5))


async def test_a_request_takes_three_round_trips_and_each_top_up_one(
    own_redis: services.Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Redis without other clients, so that what it counted can be compared."""
    # On a busy machine news would not wait for the message that takes them along.
    monkeypatch.setattr("gateway.dispatch.redis_queue.DEFER_S", 30.0)
    store, gateway = RedisQuotaStore(own_redis.url, timeout_s=10), Gateway(own_redis.url, "east", 8)
    await filled(store)
    store.board = gateway.queue.board
    async with running(gateway):
        await one_request(gateway, store, "warm", 1)
        with redis.Redis.from_url(own_redis.url) as client:
            for top_ups in (0, 0, 1, 5):
                before = store.round_trips + gateway.queue.round_trips
                client.config_resetstat()
                await one_request(gateway, store, f"with-{top_ups}-{before}", top_ups)
                assert store.round_trips + gateway.queue.round_trips - before == 3 + top_ups
                # Redis sees these, and what rode along: the end, and progress with each top-up.
                calls = client.info("commandstats")["cmdstat_evalsha"]["calls"]  # type: ignore[index]
                assert calls == 3 + top_ups + 1 + top_ups
            assert client.hlen("fairgate:flow:{pool}:tickets") == 0, "everything was said"
    await store.close()


async def test_many_at_once_take_fewer(redis_url: str, store: RedisQuotaStore) -> None:
    gateway = Gateway(redis_url, "east", 8)
    store.board = gateway.queue.board
    async with running(gateway):
        # The first time connections are opened, and greet.
        await asyncio.gather(*(one_request(gateway, store, f"warm{number}") for number in range(60)))
        before, exchanges = store.round_trips, gateway.queue.round_trips
        await asyncio.gather(*(one_request(gateway, store, f"r{number}") for number in range(60)))
        assert len(gateway.turns) == 120
        assert store.round_trips - before == 2 * 60
        assert gateway.queue.round_trips - exchanges <= 60 // 2, "arrivals share exchanges"


async def test_a_waiting_request_costs_nothing_and_is_woken_by_the_others_word(redis_url: str) -> None:
    east, west = Gateway(redis_url, "east", 2), Gateway(redis_url, "west", 2)
    async with running(east, west):
        for name in ("e1", "e2"):
            east.arrive(name)
        await east.has_turns(2)
        for number in range(5):
            west.arrive(f"w{number}")
        await until(lambda: west.queue.pool_queued[2] == 5)
        spoken = west.queue.round_trips
        for name in ("e1", "e2"):
            east.finish(name)
        await west.has_turns(2)
        assert west.turns == ["w0", "w1"]
        assert west.queue.round_trips == spoken, "it was told, and did not ask"
        for turn in range(3):
            west.finish(f"w{turn}")
            await west.has_turns(3 + turn)
        assert west.turns == [f"w{number}" for number in range(5)]


async def test_what_ends_is_said_without_a_settlement_too(redis_url: str) -> None:
    """Its ledger may be away for long: the place must not be."""
    east, west = Gateway(redis_url, "east", 1), Gateway(redis_url, "west", 1)
    async with running(east, west):
        east.arrive("first")
        await east.has_turns(1)
        west.arrive("second")
        east.finish("first")
        await west.has_turns(1)


async def test_a_request_that_leaves_the_line_makes_room_for_the_next(redis_url: str) -> None:
    east, west = Gateway(redis_url, "east", 1), Gateway(redis_url, "west", 1)
    async with running(east, west):
        east.arrive("runs")
        await east.has_turns(1)
        east.arrive("leaves", "two")
        await until(lambda: east.queue.pool_queued[2] == 1)
        west.arrive("waits", "three")
        assert east.queue.cancel("leaves", time.monotonic())
        east.finish("runs")
        await west.has_turns(1)
        assert west.turns == ["waits"]
        assert east.turns == ["runs"]


async def test_the_queue_is_full_for_all_gateways_together(redis_url: str) -> None:
    east = Gateway(redis_url, "east", 1, max_queued=3)
    west = Gateway(redis_url, "west", 1, max_queued=3)
    async with running(east, west):
        for number in range(4):
            east.arrive(f"e{number}")
        await until(lambda: east.turns == ["e0"] and east.queue.pool_queued[2] == 3)
        west.arrive("w")
        await until(lambda: bool(west.refused))
        assert west.refused == ["w"]
        assert len(west.queue.flow) == 0


async def test_a_server_that_forgot_the_script_is_told_it_again(
    redis_url: str, store: RedisQuotaStore
) -> None:
    gateway = Gateway(redis_url, "east", 8)
    store.board = gateway.queue.board
    async with running(gateway):
        await one_request(gateway, store, "warm")
        with services.open_redis(redis_url) as client:
            client.script_flush()
            await one_request(gateway, store, "r1")
            client.script_flush()
            assert isinstance(await store.reserve("r2", [BUDGET], whole(5), 60), Granted)
            gateway.arrive("r2")
            await until(lambda: "r2" in gateway.turns)
            client.script_flush()
            gateway.finish("r2")
            assert await store.settle("r2", Amounts(output_tokens=5))
            await one_request(gateway, store, "r3")
            assert client.hlen("fairgate:flow:{pool}:tickets") <= 1


async def test_a_queue_that_is_spoilt_begins_anew_for_both_gateways(redis_url: str) -> None:
    """Who has nothing to say is told, so that what runs there is counted before the next turn."""
    east, west = Gateway(redis_url, "east", 2), Gateway(redis_url, "west", 2)
    async with running(east, west):
        west.arrive("runs")
        west.arrive("runs too")
        await west.has_turns(2)
        with services.open_redis(redis_url) as client:
            client.set("fairgate:flow:{pool}:meta", "garbage")
        east.arrive("first")
        await until(lambda: east.queue.pool_queued[2] == 1 and west.queue.pool_queued[2] == 1)
        assert east.turns == []
        west.finish("runs")
        await east.has_turns(1)


@pytest.mark.parametrize("may_go_alone", [False, True])
async def test_a_queue_that_takes_nothing_is_broken_until_it_does(
    own_redis: services.Service, caplog: pytest.LogCaptureFixture, may_go_alone: bool
) -> None:
    gateway = Gateway(own_redis.url, "east", 1, may_go_alone=may_go_alone)
    async with running(gateway):
        with redis.Redis.from_url(own_redis.url) as client:
            gateway.arrive("first")
            await gateway.has_turns(1)
            gateway.arrive("second")
            client.execute_command("ACL", "SETUSER", "default", "-zrangebylex")
            await until(lambda: gateway.queue.is_broken)
            if may_go_alone:
                gateway.finish("first")
                await gateway.has_turns(2)
            else:
                with pytest.raises(QuotaStoreUnavailable):
                    gateway.arrive("refused")
            client.execute_command("ACL", "SETUSER", "default", "+zrangebylex")
            await until(lambda: not gateway.queue.is_broken)
            gateway.finish(gateway.turns[-1])
            gateway.arrive("third")
            await gateway.has_turns(2 if not may_go_alone else 3)
    said = [each.getMessage() for each in caplog.records if "refuses what this gateway says" in each.message]
    assert ["broken" in line for line in said] == [False, True], "once a minute each"


@pytest.fixture
def own_redis() -> Iterator[services.Service]:
    server = services.start_redis()
    yield server
    server.stop()


async def test_while_redis_is_away_nobody_has_a_turn_and_afterwards_everybody_one(
    own_redis: services.Service,
) -> None:
    east, west = Gateway(own_redis.url, "east", 2), Gateway(own_redis.url, "west", 2)
    async with running(east, west):
        east.arrive("e0")
        west.arrive("w0", "two")
        await asyncio.gather(east.has_turns(1), west.has_turns(1))
        own_redis.kill()
        for number in range(1, 4):
            east.arrive(f"e{number}")
            west.arrive(f"w{number}", "two")
        east.finish("e0")
        await until(lambda: east.queue.is_away and west.queue.is_away)
        assert (east.turns, west.turns) == (["e0"], ["w0"])
        own_redis.start()  # empty
        # w0 still runs, so one place is free; then each end brings the next.
        await all_have_turns(east, west, 4)


async def all_have_turns(east: Gateway, west: Gateway, count: int) -> None:
    """Each its own, once, after e0 ended; what runs ends."""
    ended: set[str] = {"e0"}
    async with asyncio.timeout(DEADLINE_S):
        while len(east.turns) + len(west.turns) < 2 * count:
            for gateway in (east, west):
                assert len(set(gateway.turns) - ended) <= 2
                for name in set(gateway.turns) - ended:
                    ended.add(name)
                    gateway.finish(name)
            await asyncio.sleep(0.01)
    assert sorted(east.turns) == [f"e{number}" for number in range(count)]
    assert sorted(west.turns) == [f"w{number}" for number in range(count)]


@pytest.mark.long
@pytest.mark.parametrize("start", [services.start_cluster, services.start_sentinel])
async def test_a_master_dies_and_the_queue_goes_on_with_its_replica(start: Callable[[], Any]) -> None:
    server = start()
    async with AsyncExitStack() as closing:
        closing.callback(server.stop)
        east, west = Gateway(server.url, "east", 2), Gateway(server.url, "west", 2)
        await closing.enter_async_context(running(east, west))
        east.arrive("e0")
        west.arrive("w0", "two")
        await asyncio.gather(east.has_turns(1), west.has_turns(1))
        server.master_of(key_slot(b"pool")).kill()
        for number in range(1, 4):
            east.arrive(f"e{number}")
            west.arrive(f"w{number}", "two")
        east.finish("e0")
        await until(lambda: east.queue.is_away and west.queue.is_away)
        await all_have_turns(east, west, 4)
        await until(lambda: east.queue.is_listening and west.queue.is_listening)


async def test_alone_a_gateway_goes_on_by_itself_and_joins_again(own_redis: services.Service) -> None:
    east = Gateway(own_redis.url, "east", 2, may_go_alone=True)
    async with running(east):
        east.arrive("r0")
        await east.has_turns(1)
        own_redis.kill()
        for number in range(1, 5):
            east.arrive(f"r{number}")
        await east.has_turns(2)
        assert east.turns == ["r0", "r1"], "its window is as large as before"
        east.finish("r0")
        await east.has_turns(3)
        own_redis.start()
        await until(lambda: not east.queue.is_away)
        east.finish("r1")
        await east.has_turns(4)
        east.finish("r2")
        await east.has_turns(5)
        assert east.turns == [f"r{number}" for number in range(5)]


RIGHTS = (
    "resetkeys ~fairgate* resetchannels &fairgate* -@all +@read +@write +@pubsub +@scripting +@connection"
)
RIGHTS += " +info +time +cluster|slots"


@pytest.mark.long
async def test_a_user_with_the_rights_of_the_manual_is_enough_in_a_cluster() -> None:
    cluster = services.start_cluster(replicas=0)
    async with AsyncExitStack() as closing:
        closing.callback(cluster.stop)
        for node in cluster.nodes:
            with redis.Redis.from_url(node.url) as client:
                client.execute_command("ACL", "SETUSER", "fairgate", "on", ">s@cret", *RIGHTS.split())
                client.execute_command("ACL", "SETUSER", "default", "off")
        url = cluster.url.replace("://", "://fairgate:s%40cret@")
        east, asker = Gateway(url, "east", 2), PeerRequests(url)
        store = RedisQuotaStore(url, timeout_s=10)
        closing.push_async_callback(store.close)
        closing.push_async_callback(asker.close)
        await filled(store)
        await closing.enter_async_context(running(east))
        await one_request(east, store, "r1", 1)
        await east.queue.look()
        asker.start(lambda ask: asyncio.sleep(0, NOT_HERE))
        await asker.is_listening.wait()
        assert (await asker.ask(RequestAction(SHOW, "x", "t"))).missing == 0
        found = await doctor._redis(Settings(redis_url=url))
        assert (found.ok, found.detail) == (True, "answers")
        assert len(await doctor._redis_time(Settings(redis_url=url))) == 3


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru", "volatile-ttl", "CONFIG is refused"])
async def test_the_doctor_wants_a_redis_that_drops_nothing(own_redis: services.Service, policy: str) -> None:
    with redis.Redis.from_url(own_redis.url) as client:
        if policy == "CONFIG is refused":
            client.execute_command("ACL", "SETUSER", "default", "-config")
        else:
            client.config_set("maxmemory-policy", policy)
    found = await doctor._redis(Settings(redis_url=own_redis.url))
    assert found.ok is (policy in ("noeviction", "CONFIG is refused"))
    assert found.ok or (policy in found.detail and "noeviction" in found.advice)


def test_an_order_that_cannot_be_shared_is_refused_by_name() -> None:
    queue = Gateway("redis://127.0.0.1:1/0", "east", 1).queue
    for name in ("drr", "srpt"):
        with pytest.raises(UnknownPolicy, match=f"fcfs, vtc, hybrid, not {name}.*gateway_queue=own"):
            queue.require_order(name)
        with pytest.raises(UnknownPolicy):
            queue.flow.set_order(name)
    queue.require_order("fcfs")
