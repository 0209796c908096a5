"""Redis quota store, shared by many gateways.

Redis 6.2 or newer, one Lua call per operation: atomic, exact, on the server's clock. `lua/*.lua` follow
`rules.py`; values for display (states, retry times) are computed here from the raw counters. All keys of a
tenant carry the hash tag `{tenant id}`, so they lie in one slot of a Redis Cluster. The platform's go into
every call beside them, so a request is held on both in one step; in a Cluster, where they would lie in two
slots, there are none (`keeps_platform_limits`):

    fairgate:{ten_…}:counters   hash: a limit's identity -> its counter; #epoch: the rebuild that they are of
    fairgate:{ten_…}:holds      hash: request id -> what it holds
    fairgate:{ten_…}:leases     sorted set: request id by the end of its lease
    fairgate:{ten_…}:users      hash: an end user with counters -> its record
    fairgate:{ten_…}:resting    sorted set: end user without holds by when its counters are at rest
    fairgate:{platform}:counters   hash, as a tenant's: the counters of all tenants together
    fairgate:registry           hash: the epoch and the tenants that have counters (`registry.py`)
    fairgate:server             the server process that was filled

Redis is a cache of the ledger. When it has lost its counters, or has none yet, nothing is admitted or settled
(`QuotaStoreRecovering`) until a gateway has rebuilt them."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import redis.asyncio as redis_client
from redis.exceptions import NoScriptError, RedisError

from tenants.errors import Invalid
from tenants.quota import rules, wire
from tenants.quota.registry import OnTenant, Registry, recovering
from tenants.quota.scripts import scripts
from tenants.quota.spare import SpareShares, as_text
from tenants.quota.store import (
    IN_A_CLUSTER,
    Denied,
    Granted,
    Hold,
    LimitNotKept,
    LimitState,
    Overrun,
    QuotaStoreUnavailable,
    TooManyEndUsers,
)
from tenants.storage.latency import latency_histogram
from tenants.storage.redis_client import redis_options
from tenants.types import PLATFORM, Amounts, Limit

TIMEOUT_S = 2.0
MAX_CONNECTIONS = 64
MAX_REMEMBERED = 200_000
EXPIRE_BATCH = 200
CLOCK_ATTEMPTS = 4
OLDEST_VERSION = (6, 2)


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


_KEYS = ("counters", "leases", "holds", "users", "resting")
"""A tenant's keys, in the order of the scripts."""
_CARRYING = frozenset({"reserve", "top_up", "settle"})
"""Scripts that carry a passenger: those that every request calls."""


class RedisQuotaStore:
    """`virtual_clock` (seconds since 1970) replaces the server's clock in tests."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "fairgate",
        timeout_s: float = TIMEOUT_S,
        virtual_clock: Callable[[], float] | None = None,
        max_end_users: int = rules.MAX_END_USERS,
    ) -> None:
        try:
            pool = redis_client.BlockingConnectionPool.from_url(
                url, max_connections=MAX_CONNECTIONS, timeout=timeout_s, **redis_options(timeout_s)
            )
        except ValueError as error:
            raise Invalid("redis_url", "not a URL like redis://host:6379/0") from error
        self.board: Callable[[], Passenger | None] = lambda: None
        """Called before a request's message is sent: a passenger costs no round trip of its own."""
        self.latency = latency_histogram(
            "fairgate_redis_seconds",
            "Time until Redis answered one operation on counters, a wait for a free connection included.",
        )
        self.round_trips = 0
        """Messages sent to Redis so far, including handshakes of new connections and scripts sent again."""
        self._connections = 0
        """Opened so far. A restarted server can only be reached through a new one."""
        self._proving = asyncio.Lock()
        self._proven = 0
        """Value of `_connections` when the server was last verified to be the one that was filled."""
        pool.connection_class = _counting_class(pool.connection_class, self._count, self._count_connection)
        self._redis: Any = redis_client.Redis(connection_pool=pool)
        self._prefix = prefix
        self._virtual_clock = virtual_clock
        self.spare = SpareShares(virtual_clock or time.time)
        self._max_end_users = max_end_users
        self._server_ahead_us = 0
        # Called by hash; the client library loads the text where the server lacks it.
        self._scripts = {name: self._redis.register_script(text) for name, text in scripts().items()}
        self._registry = Registry(self._redis, prefix, self._call, self._on_tenant)
        self._epoch = ""
        self._tenant_of: OrderedDict[str, str] = OrderedDict()

    async def close(self) -> None:
        """Closes the connections; holds stay."""
        await self._redis.aclose(close_connection_pool=True)

    async def reserve(
        self,
        request_id: str,
        limits: Sequence[Limit],
        hold: Hold,
        lease_ttl_s: float,
        *,
        tenant_id: str = "",
    ) -> Granted | Denied:
        rules.check_request(request_id, lease_ttl_s)
        rules.check_rising(hold.first, hold.ahead, hold.most)
        rules.check_limits(limits)
        if not self.keeps_platform_limits and any(map(rules.is_platforms, limits)):
            raise LimitNotKept(IN_A_CLUSTER)
        tenant_id = tenant_id or rules.tenant_of(limits)
        wishes = [rules.wish(limit, hold) for limit in limits]
        ages = self.spare.ages()
        head = [
            as_text(ages),
            request_id,
            wire.lease_us(lease_ttl_s),
            wire.pack(limits),
            rules.end_user_of(limits),
            self._max_end_users,
            *wire.by_meter(hold.ahead),
        ]
        async with self._call_guard():
            reply = await self._with_windows(
                self._run,
                "reserve",
                tenant_id,
                lambda now_us: [*head, *wire.columns(wire.reserve_columns, limits, wishes, now_us)],
            )
        if reply[0] == b"users":
            raise self._too_many_end_users(reply)
        if reply[0] == b"denied":
            return wire.denied_reserve(limits, wishes, reply, ages)
        self.remember(request_id, tenant_id)
        return wire.granted(reply, ages)

    async def top_up(
        self, request_id: str, used: Amounts, first: Amounts, ahead: Amounts
    ) -> Granted | Denied:
        rules.check_amounts(used)
        rules.check_rising(first, ahead)
        async with self._call_guard():
            tenant_id = await self._find_tenant(request_id)
            if tenant_id is None:
                raise KeyError(request_id)
            ages = self.spare.ages()
            numbers = [*wire.by_meter(used), *wire.by_meter(first), *wire.by_meter(ahead)]
            reply = await self._run("top_up", tenant_id, [as_text(ages), request_id, *numbers])
        if reply[0] == b"gone":
            raise KeyError(request_id)
        _check(reply)
        if reply[0] == b"denied":
            return wire.denied_top_up(first, ahead, reply, ages)
        return wire.granted(reply, ages)

    async def rebind(
        self, request_id: str, limits: Sequence[Limit], hold: Hold, used: Amounts, *, must_fit: bool
    ) -> Granted | Denied:
        rules.check_rising(hold.ahead, hold.most)
        rules.check_limits(limits)
        if not self.keeps_platform_limits and any(map(rules.is_platforms, limits)):
            raise LimitNotKept(IN_A_CLUSTER)
        parts = [rules.part_again(limit, hold, used) for limit in limits]
        ages, user = self.spare.ages(), rules.end_user_of(limits)
        head = [
            as_text(ages),
            request_id,
            int(must_fit),
            wire.pack(limits),
            user,
            self._max_end_users,
        ]
        async with self._call_guard():
            tenant_id = await self._find_tenant(request_id)
            if tenant_id is None:
                raise KeyError(request_id)
            reply = await self._with_windows(
                self._run,
                "rebind",
                tenant_id,
                lambda now_us: [*head, *wire.columns(wire.restore_columns, limits, parts, now_us)],
            )
        if reply[0] == b"gone":
            raise KeyError(request_id)
        if reply[0] == b"users":
            raise self._too_many_end_users(reply)
        if reply[0] == b"denied":
            return wire.denied_rebind(limits, reply, ages)
        return wire.granted(reply, ages)

    async def renew(self, request_ids: Sequence[str], lease_ttl_s: float) -> None:
        async with self._call_guard():
            by_tenant: dict[str, list[str]] = {}
            for request_id in request_ids:
                tenant_id = await self._find_tenant(request_id)
                if tenant_id is not None:
                    by_tenant.setdefault(tenant_id, []).append(request_id)
            for tenant_id, ids in by_tenant.items():
                await self._run("renew", tenant_id, [wire.lease_us(lease_ttl_s), *ids])

    async def settle(self, request_id: str, actual: Amounts) -> bool:
        rules.check_amounts(actual)
        async with self._call_guard():
            tenant_id = await self._find_tenant(request_id)
            if tenant_id is None:
                return False
            spare = as_text(self.spare.ages())
            reply = await self._run("settle", tenant_id, [spare, request_id, *wire.by_meter(actual)])
        _check(reply)
        self._tenant_of.pop(request_id, None)
        return bool(reply[0] == b"settled")

    async def expire(self) -> list[str]:
        ended: list[str] = []
        async with self._call_guard():
            _, tenants = await self._registry.read()
            for tenant_id in tenants:
                while True:
                    _, members = await self._run(
                        "expire", tenant_id, [as_text(self.spare.ages()), EXPIRE_BATCH]
                    )
                    ids = [member.decode() for member in members]
                    ended.extend(ids)
                    for request_id in ids:
                        self._tenant_of.pop(request_id, None)
                    if len(ids) < EXPIRE_BATCH:
                        break
        return ended

    async def overdue(self) -> list[str]:
        """At most `EXPIRE_BATCH` per tenant."""
        request_ids: list[str] = []
        async with self._call_guard():
            _, tenants = await self._registry.read()
            for tenant_id in tenants:
                _, members = await self._run("overdue", tenant_id, [EXPIRE_BATCH])
                request_ids.extend(member.decode() for member in members)
        return request_ids

    async def states(self, limits: Sequence[Limit]) -> tuple[LimitState, ...]:
        by_tenant: dict[str, list[Limit]] = {}
        for limit in limits:
            by_tenant.setdefault(limit.tenant_id, []).append(limit)
        by_identity: dict[str, LimitState] = {}
        async with self._call_guard():
            for tenant_id, mine in by_tenant.items():
                ages = self.spare.ages()
                _, now, raws = await self._run("states", tenant_id, wire.names(mine))
                spare = wire.spare_at(ages, int(now))
                for limit, raw in zip(mine, raws, strict=True):
                    counter = wire.advanced(limit, raw, int(now), spare)
                    by_identity[limit.identity] = rules.view(limit, counter, int(now), spare)
        return tuple(by_identity[limit.identity] for limit in limits)

    async def end_users(self, tenant_id: str) -> int:
        async with self._call_guard():
            _, number = await self._run("users", tenant_id, [])
        return int(number)

    async def ping(self) -> None:
        """Also rejects a server that is too old."""
        async with self._call_guard(proves=False):
            version = str((await self._redis.info("server"))["redis_version"])
            if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_VERSION:
                raise QuotaStoreUnavailable(f"Redis {version} is too old; 6.2 or newer is needed")
            await self._prove()
            self._epoch, _ = await self._registry.read()

    async def give_back(
        self, epoch: str, limits: Sequence[Limit], charged_to: Sequence[str], amounts: Amounts
    ) -> None:
        tenant_id = rules.tenant_of(limits)
        columns = [
            value
            for limit, start_us in rules.charged_limits(limits, charged_to)
            if limit.window is not None
            for value in (limit.identity, wire.home(limit), start_us, amounts.of(limit.meter))
        ]
        async with self._call_guard():
            # Without joining a later epoch: its counters have it already.
            await self._on_tenant("give_back", tenant_id, [epoch, *columns])

    # ------------------------------------------------------------ rebuilding

    @property
    def epoch(self) -> str:
        return self._epoch

    @property
    def is_local(self) -> bool:
        return False

    @property
    def keeps_platform_limits(self) -> bool:
        """False in a Redis Cluster."""
        return not self._registry.is_cluster

    @property
    def _platform(self) -> tuple[str, ...]:
        return (PLATFORM,) if self.keeps_platform_limits else ()

    async def lose(self, epoch: str) -> None:
        async with self._call_guard(proves=False):
            await self._registry.lose(epoch)

    async def begin_rebuild(self, owner: str, ttl_s: float) -> bool:
        async with self._call_guard(proves=False):
            if not await self._registry.begin(owner, ttl_s):
                return False
            # The platform's first: they tell a slower attempt that it is over.
            for tenant_id in (*self._platform, *await self._registry.entered()):
                await self._rebuilding("rebuild", tenant_id, [1])
            return True

    async def rebuild(self, used: Iterable[tuple[Limit, int]]) -> None:
        """In a store in use no other gateway may settle: its settlements after `used` are overwritten."""
        by_tenant: dict[str, list[tuple[Limit, int]]] = {}
        for limit, amount in used:
            rules.check_limits([limit])
            by_tenant.setdefault(limit.tenant_id, []).append((limit, amount))
        is_owner = self._registry.attempt > 0
        async with self._call_guard(proves=not is_owner):
            for tenant_id, mine in by_tenant.items():
                await self._with_windows(
                    self._rebuilding if is_owner else self._run,
                    "rebuild",
                    tenant_id,
                    lambda now_us, mine=mine: [  # type: ignore[misc]
                        int(is_owner),
                        *(
                            value
                            for limit, amount in mine
                            for value in wire.rebuild_columns(limit, amount, now_us)
                        ),
                    ],
                )

    async def restore(
        self,
        request_id: str,
        limits: Sequence[Limit],
        charged_to: Sequence[str],
        hold: Hold,
        used: Amounts,
        lease_ttl_s: float,
        *,
        tenant_id: str = "",
    ) -> None:
        rules.check_request(request_id, lease_ttl_s)
        for amounts in (hold.first, hold.ahead, hold.most, used):
            rules.check_amounts(amounts)
        rules.check_limits(limits)
        charged = rules.charged_limits(limits, charged_to)
        tenant_id = tenant_id or rules.tenant_of(limits)
        columns = [
            value
            for limit, start_us in charged
            for value in wire.restore_columns(limit, rules.part_again(limit, hold, used), start_us)
        ]
        text, ahead = wire.pack([limit for limit, _ in charged]), wire.by_meter(hold.ahead)
        async with self._call_guard(proves=False):
            await self._rebuilding(
                "restore", tenant_id, [request_id, wire.lease_us(lease_ttl_s), text, *ahead, *columns]
            )
        self.remember(request_id, tenant_id)

    async def finish_rebuild(self, owner: str, epoch: str) -> None:
        async with self._call_guard(proves=False):
            for tenant_id in await self._registry.entered():
                await self._rebuilding("stamp", tenant_id, [epoch])
            await self._registry.finish(epoch)
        self._epoch = epoch

    # ------------------------------------------------------------ calls

    @asynccontextmanager
    async def _call_guard(self, *, proves: bool = True) -> AsyncIterator[None]:
        """Wraps every operation. An answer through a new connection is valid only once the server is verified
        to be the one that was filled (`proves`: not while it is being filled)."""
        try:
            yield
            if proves and self._proven < self._connections:
                await self._prove()
        except (RedisError, OSError, TimeoutError) as error:
            raise QuotaStoreUnavailable("the quota store (Redis) is not available") from error

    async def _prove(self) -> None:
        """Verifies the server once for all new connections: a burst opens many."""
        async with self._proving:
            if self._proven < self._connections:
                connections = self._connections
                await self._registry.prove()
                self._proven = connections

    def _count(self) -> None:
        self.round_trips += 1

    def _count_connection(self) -> None:
        self._connections += 1

    async def _call(self, script: str, keys: list[str], arguments: list[Any]) -> list[Any]:
        began_s = time.perf_counter()
        reply = await self._send(script, keys, arguments)
        self.latency.observe(time.perf_counter() - began_s)
        return reply

    async def _send(self, script: str, keys: list[str], arguments: list[Any]) -> list[Any]:
        now_us = 0 if self._virtual_clock is None else round(self._virtual_clock() * 1e6)
        if script in _CARRYING and (passenger := self.board()) is not None:
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
        if self.keeps_platform_limits:
            keys.append(f"{self._prefix}:{{{PLATFORM}}}:counters")
        return await self._call(script, keys, arguments)

    async def _run(self, script: str, tenant_id: str, arguments: list[Any]) -> list[Any]:
        """Runs one operation; joins the current epoch, or raises, if tenant or platform is of another."""
        reply = await self._on_tenant(script, tenant_id, [self._epoch, *arguments])
        if reply[0] != b"lost":
            return reply
        for joining in dict.fromkeys((*self._platform, tenant_id)):
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
        for _ in range(CLOCK_ATTEMPTS):
            reply = await run(script, tenant_id, arguments(self._now_us()))
            if len(reply) > 1:
                self._server_ahead_us = int(reply[1]) - self._local_us()
            if reply[0] != b"clock":
                return reply
        raise QuotaStoreUnavailable("the clock of Redis jumps")

    def _too_many_end_users(self, reply: list[Any]) -> TooManyEndUsers:
        rest_us = int(reply[2])
        until_rest_s = rules.until_rest_s(None if rest_us < 0 else rest_us, int(reply[1]))
        return TooManyEndUsers(self._max_end_users, until_rest_s)

    def _local_us(self) -> int:
        return round((self._virtual_clock or time.time)() * 1e6)

    def _now_us(self) -> int:
        return self._local_us() + self._server_ahead_us

    def remember(self, request_id: str, tenant_id: str) -> None:
        """Caches the request's tenant, so that it need not be searched for."""
        self._tenant_of[request_id] = tenant_id
        if len(self._tenant_of) > MAX_REMEMBERED:
            self._tenant_of.popitem(last=False)

    async def _find_tenant(self, request_id: str) -> str | None:
        """Cached or, after a restart, searched for among all tenants."""
        if request_id in self._tenant_of:
            return self._tenant_of[request_id]
        _, tenants = await self._registry.read()
        pipeline = self._redis.pipeline(transaction=False)
        for tenant_id in tenants:
            pipeline.hexists(f"{self._prefix}:{{{tenant_id}}}:holds", request_id)
        for tenant_id, exists in zip(tenants, await pipeline.execute(), strict=True):
            if exists:
                self.remember(request_id, tenant_id)
                return tenant_id
        return None


def _check(reply: list[Any]) -> None:
    if reply[0] == b"overrun":
        raise Overrun(reply[1].decode(), int(reply[2]), int(reply[3]))


def _counting_class(kind: type[Any], sends: Callable[[], None], connects: Callable[[], None]) -> type[Any]:
    """A connection class that calls `sends` on every send and `connects` after connecting."""

    class Counting(kind):  # type: ignore[misc]
        async def send_packed_command(self, *arguments: Any, **options: Any) -> None:
            sends()
            await super().send_packed_command(*arguments, **options)

        async def _connect(self) -> None:
            await super()._connect()
            connects()

    return Counting
