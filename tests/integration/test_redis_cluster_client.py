"""The client of a Redis Cluster routes, follows slots that move, waits for connections, outlives a master."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
import redis
from redis.crc import key_slot
from redis.exceptions import ConnectionError as Disconnected

from tenants.storage.redis_client import ask_servers, open_client
from tests.support import services
from tests.support.services import Cluster, Service

pytestmark = pytest.mark.long

KEYS = [f"key-{number}" for number in range(60)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    started = services.start_cluster()
    yield started
    started.stop()


class Clients:
    """Opens clients, and counts the connections that they open, by node."""

    def __init__(self, closing: AsyncExitStack) -> None:
        self.opened = Counter[str]()
        self.sent = 0
        self._closing = closing

    def open(self, cluster: Cluster, **options: Any) -> Any:
        def sends() -> None:
            self.sent += 1

        client = open_client(
            cluster.url, 2.0, connects=lambda node: self.opened.update([node]), sends=sends, **options
        )
        self._closing.push_async_callback(client.aclose)
        return client


@pytest.fixture
async def clients() -> AsyncIterator[Clients]:
    async with AsyncExitStack() as closing:
        yield Clients(closing)


def at(service: Service) -> str:
    return service.url.removeprefix("redis://").removesuffix("/0")


def on_node(service: Service, act: Callable[[Any], Any]) -> Any:
    with redis.Redis.from_url(service.url) as client:
        return act(client)


async def test_commands_and_pipelines_reach_the_master_of_each_key(
    cluster: Cluster, clients: Clients
) -> None:
    client = clients.open(cluster)
    await asyncio.gather(*(client.set(key, key) for key in KEYS))
    sizes = [on_node(node, lambda each: each.dbsize()) for node in cluster.nodes[:3]]
    assert all(sizes)
    assert sum(sizes) == len(KEYS)
    before = clients.sent
    async with client.pipeline(transaction=False) as pipe:
        for key in KEYS:
            pipe.get(key)
        assert await pipe.execute() == [key.encode() for key in KEYS]
    assert clients.sent - before == 3
    assert len(await ask_servers(client, "TIME")) == 3
    assert {found["redis_mode"] for found in (await client.info_of_servers()).values()} == {"cluster"}


async def test_a_script_is_loaded_where_a_node_lacks_it(cluster: Cluster, clients: Clients) -> None:
    client = clients.open(cluster)
    script = client.register_script("return redis.call('INCRBY', KEYS[1], ARGV[1])")
    for node in cluster.nodes:
        on_node(node, lambda each: each.script_flush())
    assert [await script(keys=[f"sum-{key}"], args=[7]) for key in KEYS] == [7] * len(KEYS)


async def test_moved_slots_are_followed_and_learned(cluster: Cluster, clients: Clients) -> None:
    client = clients.open(cluster)
    await client.set("{moved}a", 1)
    slot = key_slot(b"moved")
    target = next(node for node in cluster.nodes[:3] if node is not cluster.master_of(slot))
    with cluster.moving(slot, target):
        pass
    assert await client.get("{moved}a") == b"1"
    before = clients.sent
    assert await client.get("{moved}a") == b"1"
    assert clients.sent - before == 1


async def test_while_a_slot_moves_its_new_keys_are_made_at_the_target(
    cluster: Cluster, clients: Clients
) -> None:
    client = clients.open(cluster)
    script = client.register_script("return redis.call('INCR', KEYS[1])")
    await client.set("{asked}old", 1)
    slot = key_slot(b"asked")
    target = next(node for node in cluster.nodes[:3] if node is not cluster.master_of(slot))
    with cluster.moving(slot, target):
        assert await client.incr("{asked}new") == 1
        assert await client.incr("{asked}old") == 2
        assert await script(keys=["{asked}other"]) == 1
        async with client.pipeline(transaction=False) as pipe:
            pipe.incr("{asked}new").incr("{asked}old").get("elsewhere")
            assert await pipe.execute() == [2, 3, None]
        count = on_node(target, lambda each: each.execute_command("CLUSTER COUNTKEYSINSLOT", slot))
        assert count == 2
        # Keys of one command that are apart are waited for, no longer than the timeout.
        with pytest.raises(Disconnected, match="does not answer"):
            await client.mget("{asked}old", "{asked}new")
    assert await client.mget("{asked}old", "{asked}new") == [b"3", b"2"]


async def test_connections_are_waited_for(cluster: Cluster, clients: Clients) -> None:
    client = clients.open(cluster, most=2)
    assert await asyncio.gather(*(client.incr("one") for _ in range(200))) != []
    assert await client.get("one") == b"200"
    assert max(clients.opened.values()) <= 2


async def test_a_master_dies_and_only_its_slots_wait(clients: Clients) -> None:
    own = services.start_cluster()
    async with AsyncExitStack() as closing:
        closing.callback(own.stop)
        client, once = clients.open(own), clients.open(own, retries=False)
        await asyncio.gather(*(client.set(key, key) for key in KEYS), *(once.get(key) for key in KEYS))
        dead = own.nodes[0]
        of_dead = [key for key in KEYS if own.master_of(key_slot(key.encode())) is dead]
        others = [key for key in KEYS if key not in of_dead]
        opened = Counter(clients.opened)
        dead.kill()
        with pytest.raises(Disconnected):
            await once.get(of_dead[0])
        waiting = asyncio.create_task(client.get(of_dead[0]))
        assert [await client.get(key) for key in others] == [key.encode() for key in others]
        assert clients.opened == opened  # nothing that others use was dropped
        with pytest.raises(Disconnected):
            await client.info_of_servers()
        with suppress(Disconnected):
            await waiting
        for each in (client, once):
            async with asyncio.timeout(30):
                while await asyncio.gather(each.get(of_dead[0]), return_exceptions=True) != [
                    of_dead[0].encode()
                ]:
                    pass
            assert [await each.get(key) for key in of_dead] == [key.encode() for key in of_dead]
        assert at(dead) not in await client.info_of_servers()
