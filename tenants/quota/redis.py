"""Redis quota store, shared by many gateways.

Redis 6.2 or newer, one Lua call per operation (`redis_calls.py`). `lua/*.lua` follow `rules.py`; values for
display (states, retry times) are computed here from the raw counters. In a Redis Cluster limits on the
platform are held by a second call (`two_steps.py`):

    fairgate:{ten_…}:counters   hash: a limit's identity -> its counter; #epoch: the rebuild that they are of
    fairgate:{ten_…}:holds      hash: request id -> what it holds
    fairgate:{ten_…}:leases     sorted set: request id by the end of its lease
    fairgate:{ten_…}:users      hash: an end user with counters -> its record
    fairgate:{ten_…}:resting    sorted set: end user without holds by when its counters are at rest
    fairgate:{platform}:…       the same of all tenants together; with one server the counters only
    fairgate:registry           hash: the epoch and the tenants that have counters (`registry.py`)
    fairgate:server             the server processes that were filled

Redis is a cache of the ledger. When it has lost its counters, or has none yet, nothing is admitted or settled
(`QuotaStoreRecovering`) until a gateway has rebuilt them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tenants.errors import Invalid
from tenants.quota import rules, wire
from tenants.quota.redis_calls import TIMEOUT_S
from tenants.quota.spare import as_text
from tenants.quota.store import Denied, Granted, Hold, LimitState, QuotaStoreUnavailable
from tenants.quota.two_steps import TwoSteps
from tenants.types import PLATFORM, Amounts, Limit

EXPIRE_BATCH = 200
OLDEST_VERSION = (6, 2)


class RedisQuotaStore(TwoSteps):
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
        super().__init__(url, prefix, timeout_s, virtual_clock, max_end_users)

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
        tenant_id = tenant_id or rules.tenant_of(limits)
        async with self._call_guard():
            return await self._reserve_all(tenant_id, request_id, limits, hold, lease_ttl_s)

    async def top_up(
        self, request_id: str, used: Amounts, first: Amounts, ahead: Amounts
    ) -> Granted | Denied:
        rules.check_amounts(used)
        rules.check_rising(first, ahead)
        async with self._call_guard():
            places = await self._live_places(request_id)
            return await self._top_up_all(places, request_id, used, first, ahead)

    async def rebind(
        self, request_id: str, limits: Sequence[Limit], hold: Hold, used: Amounts, *, must_fit: bool
    ) -> Granted | Denied:
        rules.check_rising(hold.ahead, hold.most)
        rules.check_limits(limits)
        async with self._call_guard():
            places = await self._live_places(request_id)
            return await self._rebind_all(places, request_id, limits, hold, used, must_fit)

    async def renew(self, request_ids: Sequence[str], lease_ttl_s: float) -> None:
        async with self._call_guard():
            by_place: dict[str, list[str]] = {}
            for request_id in request_ids:
                for place in await self._find_places(request_id):
                    by_place.setdefault(place, []).append(request_id)
            for place, ids in by_place.items():
                await self._run("renew", place, [wire.lease_us(lease_ttl_s), *ids])

    async def settle(self, request_id: str, actual: Amounts) -> bool:
        rules.check_amounts(actual)
        async with self._call_guard():
            places = await self._find_places(request_id)
            if not places:
                return False
            is_settled = await self._settle_all(places, request_id, actual)
        self._places.pop(request_id, None)
        return is_settled

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
                        self._places.pop(request_id, None)
                    if len(ids) < EXPIRE_BATCH:
                        break
        return list(dict.fromkeys(ended))

    async def overdue(self) -> list[str]:
        """At most `EXPIRE_BATCH` per tenant."""
        request_ids: list[str] = []
        async with self._call_guard():
            _, tenants = await self._registry.read()
            for tenant_id in tenants:
                _, members = await self._run("overdue", tenant_id, [EXPIRE_BATCH])
                request_ids.extend(member.decode() for member in members)
        return list(dict.fromkeys(request_ids))

    async def states(self, limits: Sequence[Limit]) -> tuple[LimitState, ...]:
        async with self._call_guard():
            return await self._states(limits)

    async def end_users(self, tenant_id: str) -> int:
        async with self._call_guard():
            _, number = await self._run("users", tenant_id, [])
        return int(number)

    async def ping(self) -> None:
        """Also rejects a server that is too old, or one of a cluster that is to be used alone."""
        async with self._call_guard(proves=False):
            server = await self._redis.info("server")
            if server.get("redis_mode") == "cluster" and not self._in_cluster:
                named = self._redis.connection_pool.connection_kwargs  # a URL may lack port and host
                where = f"{named.get('host', 'localhost')}:{named.get('port', server['tcp_port'])}"
                raise Invalid(
                    "redis_url", f"{where} is a node of a Redis Cluster: write redis+cluster://{where}"
                )
            version = str(server["redis_version"])
            if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_VERSION:
                raise QuotaStoreUnavailable(f"Redis {version} is too old; 6.2 or newer is needed")
            await self._prove(self._answered())
            self._epoch, _ = await self._registry.read()

    async def give_back(
        self, epoch: str, limits: Sequence[Limit], charged_to: Sequence[str], amounts: Amounts
    ) -> None:
        own, shared = self._split(limits)
        places = {rules.tenant_of(limits): own} | ({PLATFORM: shared} if shared else {})
        async with self._call_guard():
            for place, mine in places.items():
                columns = [
                    value
                    for limit, start_us in rules.charged_limits(mine, charged_to)
                    if limit.window is not None
                    for value in (limit.identity, wire.home(limit), start_us, amounts.of(limit.meter))
                ]
                # Without joining a later epoch: its counters have it already.
                await self._on_tenant("give_back", place, [epoch, *columns])

    # ------------------------------------------------------------ rebuilding

    @property
    def epoch(self) -> str:
        return self._epoch

    @property
    def is_local(self) -> bool:
        return False

    async def lose(self, epoch: str) -> None:
        async with self._call_guard(proves=False):
            await self._registry.lose(epoch)

    async def begin_rebuild(self, owner: str, ttl_s: float) -> bool:
        async with self._call_guard(proves=False):
            if not await self._registry.begin(owner, ttl_s):
                return False
            # The platform's first: they tell a slower attempt that it is over.
            for place in (PLATFORM, *await self._registry.entered(), *await self._registry.unregistered()):
                await self._rebuilding("rebuild", place, [1])
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
        own, shared = (rules.charged_limits(some, charged_to) for some in self._split(limits))
        parts = {tenant_id or rules.tenant_of(limits): own} | ({PLATFORM: shared} if shared else {})
        async with self._call_guard(proves=False):
            for place, charged in parts.items():
                await self._restore(place, request_id, charged, hold, used, lease_ttl_s)
        self._note(request_id, tuple(parts))

    async def finish_rebuild(self, owner: str, epoch: str) -> None:
        async with self._call_guard(proves=False):
            for tenant_id in await self._registry.entered():
                await self._rebuilding("stamp", tenant_id, [epoch])
            await self._registry.finish(epoch)
        self._epoch = epoch
