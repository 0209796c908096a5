"""Calls of the quota store's scripts in Redis: connections, the proof of servers, epochs, windows.

One Lua call per operation: atomic, exact, on the server's clock. All keys of a tenant carry the hash tag
`{tenant id}`, so they lie in one slot of a Redis Cluster. With one server the platform's counters go into
every call beside them, so a request is held on both in one step. In a Cluster they lie in another slot, and
the platform is a place like a tenant, with holds of its own (`redis.py` holds there in a second step)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from redis.exceptions import NoScriptError, RedisError

from tenants.errors import Invalid
from tenants.quota.registry import OnTenant, Registry, recovering
from tenants.quota.scripts import scripts
from tenants.quota.spare import SpareShares
from tenants.quota.store import Overrun, QuotaNodeUnavailable, QuotaStoreUnavailable, TooManyEndUsers
from tenants.storage.latency import latency_histogram
from tenants.storage.redis_client import is_cluster, open_client
from tenants.types import PLATFORM

TIMEOUT_S = 2.0
MAX_CONNECTIONS = 64
CLOCK_ATTEMPTS = 4

_KEYS = ("counters", "leases", "holds", "users", "resting")
"""A tenant's keys, in the order of the scripts."""
_CARRYING = frozenset({"reserve", "top_up", "settle"})
"""Scripts that carry a passenger: those that every request calls."""
_ANSWERED: ContextVar[set[str]] = ContextVar("answered")
"""Nodes of a cluster that answered the operation under way."""


@dataclass(frozen=True, slots=True)
class Passenger:
    """A script of another component, sent in the same message as one of the store's."""

    script: Any
    keys: list[str]
    arguments: list[Any]
    arrived: Callable[[Any], None]
    """Called with the answer."""
    failed: Callable[[], None]
    """Called when there is no answer; whether the script ran is not known."""


class RedisCalls:
    """`virtual_clock` (seconds since 1970) replaces the server's clock in tests."""

    def __init__(
        self, url: str, prefix: str, timeout_s: float, virtual_clock: Callable[[], float] | None
    ) -> None:
        try:
            self._in_cluster = is_cluster(url)
            self._redis: Any = open_client(
                url, timeout_s, most=MAX_CONNECTIONS, connects=self._count_connection, sends=self._count
            )
        except ValueError as error:
            raise Invalid("redis_url", "not a URL like redis://host:6379/0") from error
        if self._in_cluster:
            self._redis.answered = _note_answer
        self.board: Callable[[], Passenger | None] = lambda: None
        """Called before a request's message is sent: a passenger costs no round trip of its own. (A cluster
        has its keys on another node: there it is not asked.)"""
        self.latency = latency_histogram(
            "fairgate_redis_seconds",
            "Time until Redis answered one operation on counters, a wait for a free connection included.",
        )
        self.round_trips = 0
        """Messages sent to Redis so far, including handshakes of new connections and scripts sent again."""
        self._connections: Counter[str] = Counter()
        """Opened so far, by node. A restarted server can only be reached through a new one."""
        self._proving: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._proven: Counter[str] = Counter()
        """`_connections` when the node was last verified to be one that was filled."""
        self._prefix = prefix
        self._virtual_clock = virtual_clock
        self.spare = SpareShares(virtual_clock or time.time)
        self._server_ahead_us = 0
        # Called by hash; the client library loads the text where the server lacks it.
        self._scripts = {name: self._redis.register_script(text) for name, text in scripts().items()}
        self._registry = Registry(self._redis, prefix, self._call, self._on_tenant)
        self._epoch = ""

    async def close(self) -> None:
        """Closes the connections; holds stay."""
        await self._redis.aclose(close_connection_pool=True)

    @asynccontextmanager
    async def _call_guard(self, *, proves: bool = True) -> AsyncIterator[None]:
        """Wraps every operation. An answer through a new connection is valid only once the server is verified
        to be the one that was filled (`proves`: not while it is being filled)."""
        answered = set() if self._in_cluster else {""}
        token = _ANSWERED.set(answered)
        try:
            try:
                yield
            except (KeyError, Overrun, TooManyEndUsers):
                await self._prove(answered)  # these are answers, too
                raise
            if proves:
                await self._prove(answered)
        except (RedisError, OSError, TimeoutError) as error:
            if self._in_cluster:
                raise QuotaNodeUnavailable(
                    "a node of the quota store (Redis Cluster) is not available"
                ) from error
            raise QuotaStoreUnavailable("the quota store (Redis) is not available") from error
        finally:
            _ANSWERED.reset(token)

    def _answered(self) -> set[str]:
        """Nodes that have answered the operation under way."""
        return _ANSWERED.get()

    async def _prove(self, nodes: Iterable[str]) -> None:
        """Verifies each server once for all new connections: a burst opens many."""
        for node in sorted(nodes):
            if self._proven[node] < self._connections[node]:
                async with self._proving[node]:
                    if self._proven[node] < (connections := self._connections[node]):
                        await self._registry.prove(node)
                        self._proven[node] = connections

    def _count(self) -> None:
        self.round_trips += 1

    def _count_connection(self, node: str) -> None:
        self._connections[node] += 1

    async def _call(self, script: str, keys: list[str], arguments: list[Any]) -> list[Any]:
        began_s = time.perf_counter()
        reply = await self._send(script, keys, arguments)
        self.latency.observe(time.perf_counter() - began_s)
        return reply

    async def _send(self, script: str, keys: list[str], arguments: list[Any]) -> list[Any]:
        now_us = 0 if self._virtual_clock is None else round(self._virtual_clock() * 1e6)
        if script in _CARRYING and not self._in_cluster and (passenger := self.board()) is not None:
            answered = await self._carry(script, keys, [now_us, *arguments], passenger)
            if answered is not None:
                return answered
        reply: list[Any] = await self._scripts[script](keys=keys, args=[now_us, *arguments])
        return reply

    async def _carry(
        self, script: str, keys: list[str], arguments: list[Any], passenger: Passenger
    ) -> list[Any] | None:
        """Sends both scripts in one message; None where the server no longer has ours."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.evalsha(self._scripts[script].sha, len(keys), *keys, *arguments)
        pipeline.evalsha(passenger.script.sha, len(passenger.keys), *passenger.keys, *passenger.arguments)
        try:
            reply, other = await pipeline.execute(raise_on_error=False)
        except BaseException:
            passenger.failed()
            raise
        if isinstance(other, Exception):
            passenger.failed()
        else:
            passenger.arrived(other)
        if isinstance(reply, NoScriptError):
            return None
        if isinstance(reply, Exception):
            raise reply
        answered: list[Any] = reply
        return answered

    async def _on_tenant(self, script: str, tenant_id: str, arguments: list[Any]) -> list[Any]:
        base = f"{self._prefix}:{{{tenant_id}}}"
        keys = [f"{base}:{name}" for name in _KEYS]
        if not self._in_cluster:
            keys.append(f"{self._prefix}:{{{PLATFORM}}}:counters")
        return await self._call(script, keys, arguments)

    async def _run(self, script: str, tenant_id: str, arguments: list[Any]) -> list[Any]:
        """Runs one operation; joins the current epoch, or raises, if tenant or platform is of another."""
        reply = await self._on_tenant(script, tenant_id, [self._epoch, *arguments])
        if reply[0] != b"lost":
            return reply
        for joining in dict.fromkeys((tenant_id,) if self._in_cluster else (PLATFORM, tenant_id)):
            self._epoch = await self._registry.join(joining)
        reply = await self._on_tenant(script, tenant_id, [self._epoch, *arguments])
        if reply[0] == b"lost":
            await self._registry.lose(self._epoch)
            raise recovering()
        return reply

    async def _rebuilding(self, script: str, tenant_id: str, arguments: list[Any]) -> list[Any]:
        """Runs one operation of the owner of a rebuild. Raises `QuotaStoreRecovering` for other processes."""
        attempt = await self._registry.enter(tenant_id)
        reply = await self._on_tenant(script, tenant_id, [attempt, *arguments])
        if reply[0] == b"lost":
            self._registry.attempt = 0
            raise recovering()
        return reply

    async def _with_windows(
        self, run: OnTenant, script: str, tenant_id: str, arguments: Callable[[int], list[Any]]
    ) -> list[Any]:
        """Runs a script that may open new windows. Their bounds are computed here (Lua has no time zones) for
        the estimated server time; repeated where the server reports that the estimate is wrong."""
        now_us = self._local_us() + self._server_ahead_us
        for _ in range(CLOCK_ATTEMPTS):
            reply = await run(script, tenant_id, arguments(now_us))
            if len(reply) > 1:
                now_us = int(reply[1])
                self._server_ahead_us = now_us - self._local_us()
            if reply[0] != b"clock":
                return reply
        raise QuotaStoreUnavailable("the clock of Redis jumps")

    def _local_us(self) -> int:
        return round((self._virtual_clock or time.time)() * 1e6)


def _note_answer(node: str) -> None:
    if (answered := _ANSWERED.get(None)) is not None:
        answered.add(node)
