"""Opens clients of Redis: one server, the master behind Sentinels, or a Cluster, all with one interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import redis.asyncio as redis_client
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig

from tenants.storage.redis_cluster import ClusterRedis
from tenants.storage.redis_url import CLUSTER, SENTINEL, RedisUrl, parse_redis_url

MOST_OF_A_NODE = 64
"""Connections to each node of a cluster, where the caller names no bound."""

Sends = Callable[[], None]
Connects = Callable[[str], None]


def open_client(
    url: str,
    timeout_s: float,
    *,
    most: int = 0,
    retries: bool = True,
    connects: Connects | None = None,
    sends: Sends | None = None,
) -> Any:
    """A client with the interface of redis-py's asyncio `Redis`. `most` bounds its connections (to each
    node): further callers wait for one. `retries` False: a cluster's client does not repeat a command whose
    connection was lost. `sends` is called for each message sent, `connects` for each connection opened, with
    the node (`host:port`; "" for one server). Raises `ValueError` for a URL that names no Redis."""
    place = parse_redis_url(url)
    options = redis_options(timeout_s)

    def counted(pool: redis_client.ConnectionPool, node: str = "") -> redis_client.Redis:
        if connects or sends:
            pool.connection_class = _counting_class(
                pool.connection_class, sends or (lambda: None), lambda: connects(node) if connects else None
            )
        return redis_client.Redis.from_pool(pool)

    def waiting(url: str, most: int) -> redis_client.ConnectionPool:
        return redis_client.BlockingConnectionPool.from_url(
            url, max_connections=most, timeout=timeout_s, **options
        )

    if place.kind == CLUSTER:
        size = most or MOST_OF_A_NODE
        return ClusterRedis(
            place.hosts, lambda node: counted(waiting(place.of_node(node), size), node), timeout_s, retries
        )
    if place.kind == SENTINEL:
        return counted(_behind_sentinels(place, timeout_s, most or MOST_OF_A_NODE))
    return counted(waiting(url, most) if most else redis_client.ConnectionPool.from_url(url, **options))


def is_cluster(client_or_url: Any) -> bool:
    if isinstance(client_or_url, str):
        return parse_redis_url(client_or_url).kind == CLUSTER
    return isinstance(client_or_url, ClusterRedis)


async def ask_servers(client: Any, *command: Any) -> dict[str, Any]:
    """The answer of each server (of a cluster: of each master) to a command without a key."""
    if isinstance(client, ClusterRedis):
        return await client.ask_nodes(*command)
    return {"": await client.execute_command(*command)}


def redis_options(timeout_s: float) -> dict[str, Any]:
    """Maintenance notifications (of Redis Enterprise only) are off: with them redis-py 8 hands out
    connections that the server has closed, and after a Redis restart one request fails for each."""
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        "retry": Retry(NoBackoff(), 0),
    }


class _SentinelPool(SentinelConnectionPool, redis_client.BlockingConnectionPool):
    """Connections to the current master, waited for; redis-py's own raises where there are no more."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:
            await self.sentinel_manager.aclose()


def _behind_sentinels(place: RedisUrl, timeout_s: float, most: int) -> Any:
    options = redis_options(timeout_s)
    sentinels: Any = Sentinel([])  # type: ignore[no-untyped-call]
    sentinels.sentinels = [
        redis_client.Redis.from_url(place.of_sentinel(host), **options) for host in place.hosts
    ]
    # The Sentinels say where the master is, whatever is named here.
    of_master = {**options, **parse_url(place.of_node("master"))}
    of_master["ssl"] = of_master.pop("connection_class", None) is not None
    pool: Any = _SentinelPool
    return pool(place.service, sentinels, max_connections=most, timeout=timeout_s, **of_master)


def _counting_class(kind: type[Any], sends: Sends, connects: Callable[[], None]) -> type[Any]:
    """A connection class that calls `sends` on every send and `connects` after connecting."""

    class Counting(kind):  # type: ignore[misc]
        async def send_packed_command(self, *arguments: Any, **options: Any) -> None:
            sends()
            await super().send_packed_command(*arguments, **options)

        async def _connect(self) -> None:
            await super()._connect()
            connects()

    return Counting
