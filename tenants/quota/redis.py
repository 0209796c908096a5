"""How are budgets held when many gateways share them?

In Redis (6.2 or newer), one Lua call an operation: atomic, on the server's clock, exact. `lua/*.lua` follow
`rules.py`; what is only shown to people (states, when to retry) is computed here from the raw counters.
All of a tenant's keys carry the hash tag `{tenant id}`, so they lie in one slot of a Redis Cluster:

    fairgate:{ten_…}:counters   hash: a limit's identity -> its counter
    fairgate:{ten_…}:holds      hash: request id -> what it holds
    fairgate:{ten_…}:leases     sorted set: request id by the end of its lease
    fairgate:tenants            set: tenants that ever held something (`expire` visits them)

Redis is a cache of the ledger. When it loses its memory under a running gateway, `reserve` notices that the
tenant's counters are gone and refuses (`QuotaStoreUnavailable`) until `rebuild` has set them again.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis.asyncio as redis_client
from redis.exceptions import RedisError

from tenants.errors import Invalid
from tenants.quota import rules
from tenants.quota.rules import BucketCounter, ConcurrencyCounter, Counter, WindowCounter
from tenants.quota.store import Denied, Granted, LimitState, Overrun, QuotaStoreUnavailable
from tenants.types import Amounts, Limit, Meter, Mode, SubjectKind, Tier, Window

TIMEOUT_S = 2.0
MAX_CONNECTIONS = 64
MAX_REMEMBERED = 200_000
EXPIRE_BATCH = 200
CLOCK_ATTEMPTS = 4
OLDEST_VERSION = (6, 2)

_METERS = tuple(Meter)
_LUA = Path(__file__).parent / "lua"
_NO_TENANT = "-"
"""Requests without any limit are held, too, under no tenant's name."""


class RedisQuotaStore:
    """Implements `QuotaStore` for any number of processes. `virtual_clock` (seconds since 1970) replaces the
    server's clock in tests."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "fairgate",
        timeout_s: float = TIMEOUT_S,
        virtual_clock: Callable[[], float] | None = None,
    ) -> None:
        try:
            pool = redis_client.BlockingConnectionPool.from_url(
                url,
                max_connections=MAX_CONNECTIONS,
                timeout=timeout_s,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
            )
        except ValueError as error:
            raise Invalid("redis_url", "not a URL like redis://host:6379/0") from error
        self._redis: Any = redis_client.Redis(connection_pool=pool)
        self._prefix = prefix
        self._virtual_clock = virtual_clock
        self._server_ahead_us = 0
        common = (_LUA / "common.lua").read_text()
        # Sent by its hash; the client library loads the text where the server does not know it.
        self._scripts = {
            name: self._redis.register_script(common + (_LUA / f"{name}.lua").read_text())
            for name in ("reserve", "top_up", "renew", "settle", "expire", "states", "rebuild")
        }
        self._tenant_of: OrderedDict[str, str] = OrderedDict()
        self._seen: set[str] = set()

    async def close(self) -> None:
        """Closes the connections; holds stay until their leases run out."""
        await self._redis.aclose(close_connection_pool=True)

    async def reserve(
        self, request_id: str, limits: Sequence[Limit], amounts: Amounts, lease_ttl_s: float
    ) -> Granted | Denied:
        """See `QuotaStore.reserve`."""
        rules.check_request(request_id, lease_ttl_s)
        rules.check_amounts(amounts)
        rules.check_limits(limits)
        tenant_id = limits[0].tenant_id if limits else _NO_TENANT
        wanted = [amounts.of(limit.meter) for limit in limits]
        async with self._reaching():
            if tenant_id not in self._seen:
                await self._redis.sadd(f"{self._prefix}:tenants", tenant_id)
            head = [request_id, _lease_us(lease_ttl_s), int(tenant_id in self._seen), _pack(limits)]
            reply = await self._with_windows(
                "reserve",
                tenant_id,
                lambda now_us: [
                    *head,
                    *(
                        value
                        for limit, amount in zip(limits, wanted, strict=True)
                        for value in _reserve_arguments(limit, amount, now_us)
                    ),
                ],
            )
        if reply[0] == b"lost":
            raise QuotaStoreUnavailable("Redis has lost its counters; they must be rebuilt from the ledger")
        if reply[0] == b"denied":
            now_us = int(reply[1])
            counters = [_advanced(limit, raw, now_us) for limit, raw in zip(limits, reply[2], strict=True)]
            return _denied(limits, counters, counters, wanted, now_us)
        self._seen.add(tenant_id)
        self._remember(request_id, tenant_id)
        return self._granted(reply)

    async def top_up(self, request_id: str, amounts: Amounts) -> Granted | Denied:
        """See `QuotaStore.top_up`."""
        rules.check_amounts(amounts)
        async with self._reaching():
            tenant_id = await self._find_tenant(request_id)
            if tenant_id is None:
                raise KeyError(request_id)
            reply = await self._run("top_up", tenant_id, [request_id, *_by_meter(amounts, concurrency=0)])
        if reply[0] == b"gone":
            raise KeyError(request_id)
        if reply[0] == b"denied":
            now_us, limits = int(reply[1]), _unpack(reply[2])
            # A window that is over is judged as it is, not as the one that came after it.
            counters = [
                (_parsed(limit, raw) or rules.forgotten(limit, 0))
                if limit.window is not None
                else _advanced(limit, raw, now_us)
                for limit, raw in zip(limits, reply[3], strict=True)
            ]
            current = [_advanced(limit, raw, now_us) for limit, raw in zip(limits, reply[4], strict=True)]
            more = [0 if limit.meter is Meter.CONCURRENCY else amounts.of(limit.meter) for limit in limits]
            return _denied(limits, counters, current, more, now_us)
        return self._granted(reply)

    async def renew(self, request_ids: Sequence[str], lease_ttl_s: float) -> None:
        """See `QuotaStore.renew`."""
        async with self._reaching():
            by_tenant: dict[str, list[str]] = {}
            for request_id in request_ids:
                tenant_id = await self._find_tenant(request_id)
                if tenant_id is not None:
                    by_tenant.setdefault(tenant_id, []).append(request_id)
            for tenant_id, ids in by_tenant.items():
                await self._run("renew", tenant_id, [_lease_us(lease_ttl_s), *ids])

    async def settle(self, request_id: str, actual: Amounts) -> bool:
        """See `QuotaStore.settle`."""
        rules.check_amounts(actual)
        async with self._reaching():
            tenant_id = await self._find_tenant(request_id)
            if tenant_id is None:
                return False
            reply = await self._run("settle", tenant_id, [request_id, *_by_meter(actual, concurrency=1)])
        if reply[0] == b"overrun":
            raise Overrun(reply[1].decode(), int(reply[2]), int(reply[3]))
        self._tenant_of.pop(request_id, None)
        return bool(reply[0] == b"settled")

    async def expire(self) -> list[str]:
        """See `QuotaStore.expire`."""
        ended: list[str] = []
        async with self._reaching():
            for tenant_id in await self._known_tenants():
                while True:
                    ids = [member.decode() for member in await self._run("expire", tenant_id, [EXPIRE_BATCH])]
                    ended.extend(ids)
                    for request_id in ids:
                        self._tenant_of.pop(request_id, None)
                    if len(ids) < EXPIRE_BATCH:
                        break
        return ended

    async def states(self, limits: Sequence[Limit]) -> tuple[LimitState, ...]:
        """See `QuotaStore.states`."""
        by_tenant: dict[str, list[Limit]] = {}
        for limit in limits:
            by_tenant.setdefault(limit.tenant_id, []).append(limit)
        found: dict[str, LimitState] = {}
        async with self._reaching():
            for tenant_id, mine in by_tenant.items():
                reply = await self._run("states", tenant_id, [rules.identity(limit) for limit in mine])
                now_us = int(reply[0])
                for limit, raw in zip(mine, reply[1], strict=True):
                    found[rules.identity(limit)] = rules.view(limit, _advanced(limit, raw, now_us), now_us)
        return tuple(found[rules.identity(limit)] for limit in limits)

    async def rebuild(self, used: Iterable[tuple[Limit, int]]) -> None:
        """See `QuotaStore.rebuild`. Not while other gateways serve: it overwrites what they have settled
        since `used` was computed."""
        by_tenant: dict[str, list[tuple[Limit, int]]] = {}
        for limit, amount in used:
            rules.check_limits([limit])
            by_tenant.setdefault(limit.tenant_id, []).append((limit, amount))
        async with self._reaching():
            for tenant_id, mine in by_tenant.items():
                await self._with_windows(
                    "rebuild",
                    tenant_id,
                    lambda now_us, mine=mine: [  # type: ignore[misc]
                        value for limit, amount in mine for value in _rebuild_arguments(limit, amount, now_us)
                    ],
                )
        self._seen.clear()

    async def ping(self) -> None:
        """See `QuotaStore.ping`; also refuses a server that is too old."""
        async with self._reaching():
            version = str((await self._redis.info("server"))["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_VERSION:
            raise QuotaStoreUnavailable(f"Redis {version} is too old; 6.2 or newer is needed")

    # ------------------------------------------------------------ how

    @asynccontextmanager
    async def _reaching(self) -> AsyncIterator[None]:
        try:
            yield
        except (RedisError, OSError, TimeoutError) as error:
            raise QuotaStoreUnavailable("the quota store (Redis) is not available") from error

    async def _run(self, script: str, tenant_id: str, arguments: list[Any]) -> Any:
        base = f"{self._prefix}:{{{tenant_id}}}"
        keys = [f"{base}:counters", f"{base}:leases", f"{base}:holds"]
        now_us = 0 if self._virtual_clock is None else round(self._virtual_clock() * 1e6)
        return await self._scripts[script](keys=keys, args=[now_us, *arguments])

    async def _with_windows(
        self, script: str, tenant_id: str, arguments: Callable[[int], list[Any]]
    ) -> list[Any]:
        """Runs a script that may open new windows. Their bounds are computed here (Lua knows no time zones)
        for the server's time as we believe it to be; where it says that we are wrong, once more."""
        for _ in range(CLOCK_ATTEMPTS):
            reply: list[Any] = await self._run(script, tenant_id, arguments(self._now_us()))
            if len(reply) > 1:
                self._server_ahead_us = int(reply[1]) - self._local_us()
            if reply[0] != b"clock":
                return reply
        raise QuotaStoreUnavailable("the clock of Redis jumps")

    def _local_us(self) -> int:
        return round((self._virtual_clock or time.time)() * 1e6)

    def _now_us(self) -> int:
        return self._local_us() + self._server_ahead_us

    def _remember(self, request_id: str, tenant_id: str) -> None:
        self._tenant_of[request_id] = tenant_id
        if len(self._tenant_of) > MAX_REMEMBERED:
            self._tenant_of.popitem(last=False)

    async def _find_tenant(self, request_id: str) -> str | None:
        """Whose request it is: remembered, or, after a restart, looked for among all tenants."""
        if request_id in self._tenant_of:
            return self._tenant_of[request_id]
        tenants = await self._known_tenants()
        pipeline = self._redis.pipeline(transaction=False)
        for tenant_id in tenants:
            pipeline.hexists(f"{self._prefix}:{{{tenant_id}}}:holds", request_id)
        for tenant_id, exists in zip(tenants, await pipeline.execute(), strict=True):
            if exists:
                self._remember(request_id, tenant_id)
                return tenant_id
        return None

    async def _known_tenants(self) -> list[str]:
        registered = {member.decode() for member in await self._redis.smembers(f"{self._prefix}:tenants")}
        return sorted(registered | self._seen)

    def _granted(self, reply: list[Any]) -> Granted:
        now_us, limits = int(reply[1]), _unpack(reply[2])
        pairs = [(limit, _advanced(limit, raw, now_us)) for limit, raw in zip(limits, reply[4], strict=True)]
        return Granted(
            states=tuple(rules.view(limit, counter, now_us) for limit, counter in pairs),
            exceeded=tuple(
                limit
                for limit, counter in pairs
                if limit.mode is not Mode.HARD and rules.is_exceeded(limit, counter)
            ),
            charged_to=tuple(
                rules.charge_name(limit, WindowCounter(int(start), 0, 0, 0) if limit.window else counter)
                for (limit, counter), start in zip(pairs, reply[3], strict=True)
            ),
        )


def _denied(
    limits: Sequence[Limit],
    counters: Sequence[Counter],
    current: Sequence[Counter],
    wanted: Sequence[int],
    now_us: int,
) -> Denied:
    denied = rules.refuse(limits, counters, wanted, now_us)
    assert denied is not None, "the Lua scripts and rules.py disagree"
    states = tuple(rules.view(limit, counter, now_us) for limit, counter in zip(limits, current, strict=True))
    return replace(denied, states=states)


def _lease_us(lease_ttl_s: float) -> int:
    return round(lease_ttl_s * 1e6)


def _by_meter(amounts: Amounts, *, concurrency: int) -> list[int]:
    return [concurrency if meter is Meter.CONCURRENCY else amounts.of(meter) for meter in _METERS]


def _shape(limit: Limit) -> str:
    if limit.window is not None:
        return "w"
    return "b" if limit.is_bucket else "c"


def _bounds(limit: Limit, now_us: int) -> tuple[int, int]:
    if limit.window is None:
        return 0, 0
    return rules.window_bounds_us(limit.window, limit.time_zone, now_us)


def _reserve_arguments(limit: Limit, wanted: int, now_us: int) -> list[Any]:
    return [
        rules.identity(limit),
        _shape(limit),
        int(limit.mode is Mode.HARD),
        _METERS.index(limit.meter) + 1,
        wanted,
        limit.amount,
        *_bounds(limit, now_us),
        rules.scale(limit.meter),
        rules.rate_per_ms(limit) if limit.is_bucket else 0,
    ]


def _rebuild_arguments(limit: Limit, used: int, now_us: int) -> list[Any]:
    return [
        rules.identity(limit),
        _shape(limit),
        used,
        limit.amount,
        *_bounds(limit, now_us),
        rules.scale(limit.meter),
    ]


def _parsed(limit: Limit, raw: bytes) -> Counter | None:
    numbers = [int(number) for number in raw.split()]
    if not numbers:
        return None
    if limit.window is not None:
        return WindowCounter(*numbers)
    return BucketCounter(*numbers) if limit.is_bucket else ConcurrencyCounter(*numbers)


def _advanced(limit: Limit, raw: bytes, now_us: int) -> Counter:
    return rules.advance(limit, _parsed(limit, raw), now_us)


def _pack(limits: Sequence[Limit]) -> str:
    """Limits as text that Redis keeps with the hold, so that another process can go on with it."""
    return json.dumps(
        [
            [
                limit.limit_id,
                limit.tenant_id,
                limit.kind,
                limit.subject_id,
                limit.meter,
                limit.amount,
                limit.window,
                limit.time_zone,
                limit.rate_per_s,
                limit.mode,
                limit.tier,
            ]
            for limit in limits
        ],
        separators=(",", ":"),
    )


def _unpack(text: bytes) -> list[Limit]:
    return [
        Limit(
            limit_id,
            tenant_id,
            SubjectKind(kind),
            subject_id,
            Meter(meter),
            amount,
            None if window is None else Window(window),
            time_zone,
            rate_per_s,
            Mode(mode),
            None if tier is None else Tier(tier),
        )
        for (
            limit_id,
            tenant_id,
            kind,
            subject_id,
            meter,
            amount,
            window,
            time_zone,
            rate_per_s,
            mode,
            tier,
        ) in json.loads(text)
    ]
