"""Model of the counters that several gateways share.

The twin, in plain Python, of `registry.py`, of what every script asks before it counts (is this the caller's
epoch, is this the latest attempt at a rebuild?) and of what a gateway remembers. It counts with the store
that serves one process, one for each tenant; the platform's counters are the same in all of them. No I/O; one
operation at a time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tenants.quota import rules
from tenants.quota.memory import MemoryQuotaStore
from tenants.quota.store import Denied, Granted, Hold, LimitState, QuotaStoreRecovering
from tenants.types import PLATFORM, Amounts, Limit

T = TypeVar("T")


class Routed(dict[str, Any]):
    """One tenant's counters; those of the platform are elsewhere."""

    def __init__(self, platform: dict[str, Any]) -> None:
        super().__init__()
        self._platform = platform

    def _of(self, name: str) -> dict[str, Any] | None:
        return self._platform if name.startswith(f"{PLATFORM}:") else None

    def __getitem__(self, name: str) -> Any:
        found = self._of(name)
        return super().__getitem__(name) if found is None else found[name]

    def __setitem__(self, name: str, counter: Any) -> None:
        found = self._of(name)
        if found is None:
            super().__setitem__(name, counter)
        else:
            found[name] = counter

    def get(self, name: str, default: Any = None) -> Any:
        found = self._of(name)
        return super().get(name, default) if found is None else found.get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        found = self._of(name)
        return super().pop(name, *default) if found is None else found.pop(name, *default)


@dataclass
class TenantKeys:
    """What lies under one tenant's hash tag."""

    counters: MemoryQuotaStore
    epoch: str | None = None
    """Which rebuild they stem from; None: they were lost, or never there."""
    attempt: int = 0
    """The latest rebuild that wrote here."""


class Shared:
    """What lies in Redis. `clock` gives the server's time, seconds since 1970."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.lose_registry()
        self.is_the_filled_server = False
        """Is it noted that this server process was the one that was filled?"""
        self.tenants: dict[str, TenantKeys] = {}
        self._platform: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        """The platform's counters, and its windows that have ended."""

    def lose_registry(self) -> None:
        """The hash that says which counters are to be trusted is gone."""
        self.epoch: str | None = None
        self.entered: dict[str, str] = {}
        self.owner: str | None = None
        self.until_us = 0
        self.attempt = 0

    def lose_tenant(self, tenant_id: str) -> None:
        """One tenant's keys are gone, or the platform's."""
        self.tenants.pop(tenant_id, None)
        self._new_platform(tenant_id)

    def keys(self, tenant_id: str) -> TenantKeys:
        """A tenant's, new where there are none."""
        return self.tenants.setdefault(tenant_id, self._new_keys(0))

    def _new_keys(self, attempt: int) -> TenantKeys:
        store = MemoryQuotaStore(self._clock)
        store._counters, store._ended = (Routed(each) for each in self._platform)
        return TenantKeys(store, attempt=attempt)

    def _new_platform(self, tenant_id: str) -> None:
        if tenant_id == PLATFORM:
            for each in self._platform:
                each.clear()

    def check(self) -> None:
        """Asserts that counters hold what requests hold, where nothing was lost."""
        all_together = MemoryQuotaStore(self._clock)
        for keys in (each for each in self.tenants.values() if each.epoch == self.epoch):
            all_together._counters.update(keys.counters._counters)
            all_together._ended.update(keys.counters._ended)
            all_together._holds.update(keys.counters._holds)
        all_together._counters.update(self._platform[0])
        all_together._ended.update(self._platform[1])
        if all(self.keys(each).epoch == self.epoch for each in (PLATFORM, *self.entered)):
            all_together.check()

    def registry(self) -> dict[str, str]:
        """The registry's fields, as Redis shows them."""
        fields = {f"t:{tenant_id}": state for tenant_id, state in self.entered.items()}
        if self.epoch is not None:
            fields["epoch"] = self.epoch
        if self.owner is not None:
            fields |= {"owner": self.owner, "until_us": str(self.until_us)}
        if self.attempt:
            fields["attempt"] = str(self.attempt)
        return fields

    # ------------------------------------------------------------ registry.py

    def now_us(self) -> int:
        return round(self._clock() * 1e6)

    def read(self) -> tuple[str, list[str]]:
        if self.epoch is None:
            raise QuotaStoreRecovering
        return self.epoch, sorted(self.entered)

    def prove(self) -> None:
        if not self.is_the_filled_server:
            self.epoch = None
            raise QuotaStoreRecovering

    def join(self, tenant_id: str) -> str:
        if self.epoch is None:
            raise QuotaStoreRecovering
        if self.entered.get(tenant_id) != "in":
            # Not of this epoch yet: nobody can have held anything in it.
            keys = self.keys(tenant_id)
            if keys.epoch != self.epoch:
                self._new_platform(tenant_id)
                keys = self.tenants[tenant_id] = self._new_keys(keys.attempt)
            keys.epoch = self.epoch
            self.entered[tenant_id] = "in"
        return self.epoch

    def lose(self, epoch: str) -> None:
        if self.epoch == epoch:
            self.epoch = None

    def begin(self, owner: str, ttl_s: float) -> int | None:
        """The number of the attempt; None: nothing is lost, or another owner is at it."""
        now_us = self.now_us()
        if self.epoch is not None:
            return None
        if self.owner not in (None, owner) and self.until_us > now_us:
            return None
        self.owner, self.until_us = owner, now_us + round(ttl_s * 1e6)
        self.attempt = max(now_us, self.attempt + 1)
        return self.attempt

    def rebuilding(self, tenant_id: str, attempt: int) -> TenantKeys | None:
        """For the latest attempt only; its first step drops what was there."""
        if attempt != self.attempt:
            return None
        self.entered[tenant_id] = "in"
        if attempt < self.keys(PLATFORM).attempt:
            return None
        keys = self.keys(tenant_id)
        if attempt > keys.attempt:
            self._new_platform(tenant_id)
            keys = self.tenants[tenant_id] = self._new_keys(attempt)
        return keys if attempt == keys.attempt else None

    def finish(self, attempt: int, epoch: str) -> bool:
        if attempt != self.attempt or not attempt:
            return False
        self.is_the_filled_server = True
        self.epoch, self.owner = epoch, None
        return True


class Gateway:
    """What one process knows and does: the twin of `RedisQuotaStore`. `batch`: of how many overdue leases of
    a tenant it hears at once."""

    def __init__(self, shared: Shared, batch: int) -> None:
        self._shared = shared
        self._batch = batch
        self.epoch = ""
        self._attempt = 0
        self._tenant_of: dict[str, str] = {}
        self.is_connected_anew = True
        """What it hears first counts only once the server has proved to be the one that was filled."""

    async def reserve(
        self, request_id: str, limits: Sequence[Limit], hold: Hold, lease_ttl_s: float, *, tenant_id: str = ""
    ) -> Granted | Denied:
        tenant_id = tenant_id or rules.tenant_of(limits)
        answer = await self._proved(self._on(tenant_id).reserve(request_id, limits, hold, lease_ttl_s))
        if isinstance(answer, Granted):
            self._tenant_of[request_id] = tenant_id
        return answer

    async def top_up(
        self, request_id: str, used: Amounts, first: Amounts, ahead: Amounts
    ) -> Granted | Denied:
        tenant_id = self._find_tenant(request_id)
        if tenant_id is None:
            self._prove()
            raise KeyError(request_id)
        return await self._proved(self._on(tenant_id).top_up(request_id, used, first, ahead))

    async def renew(self, request_ids: Sequence[str], lease_ttl_s: float) -> None:
        by_tenant: dict[str, list[str]] = {}
        for request_id in request_ids:
            if (tenant_id := self._find_tenant(request_id)) is not None:
                by_tenant.setdefault(tenant_id, []).append(request_id)
        for tenant_id, ids in by_tenant.items():
            await self._on(tenant_id).renew(ids, lease_ttl_s)
        self._prove()

    async def settle(self, request_id: str, actual: Amounts) -> bool:
        tenant_id = self._find_tenant(request_id)
        if tenant_id is None:
            self._prove()
            return False
        settled = await self._proved(self._on(tenant_id).settle(request_id, actual))
        self._tenant_of.pop(request_id, None)
        return settled

    async def expire(self) -> list[str]:
        ended: list[str] = []
        for tenant_id in self._shared.read()[1]:
            ids = await self._on(tenant_id).expire()
            ended.extend(ids)
            for request_id in ids:
                self._tenant_of.pop(request_id, None)
        self._prove()
        return ended

    async def overdue(self) -> list[str]:
        """The first of each tenant's."""
        found: list[str] = []
        for tenant_id in self._shared.read()[1]:
            counters = self._on(tenant_id)
            ids = await counters.overdue()
            ids.sort(key=lambda name, of=counters: (of._holds[name].lease_until_us, name))  # type: ignore[misc]
            found.extend(ids[: self._batch])
        self._prove()
        return found

    async def states(self, limits: Sequence[Limit]) -> tuple[LimitState, ...]:
        found: dict[str, LimitState] = {}
        for tenant_id in dict.fromkeys(limit.tenant_id for limit in limits):
            mine = [limit for limit in limits if limit.tenant_id == tenant_id]
            states = await self._on(tenant_id).states(mine)
            found |= {state.limit.identity: state for state in states}
        self._prove()
        return tuple(found[limit.identity] for limit in limits)

    async def end_users(self, tenant_id: str) -> int:
        number = await self._on(tenant_id).end_users(tenant_id)
        self._prove()
        return number

    async def ping(self) -> None:
        self.is_connected_anew = True
        self._prove()
        self.epoch, _ = self._shared.read()

    async def lose(self, epoch: str) -> None:
        self._shared.lose(epoch)

    async def begin_rebuild(self, owner: str, ttl_s: float) -> bool:
        attempt = self._shared.begin(owner, ttl_s)
        if attempt is None:
            return False
        self._attempt = attempt
        for tenant_id in (PLATFORM, *sorted(self._shared.entered)):
            self._rebuilding(tenant_id)
        return True

    async def rebuild(self, used: Iterable[tuple[Limit, int]]) -> None:
        is_owner = self._attempt > 0
        by_tenant: dict[str, list[tuple[Limit, int]]] = {}
        for limit, amount in used:
            by_tenant.setdefault(limit.tenant_id, []).append((limit, amount))
        for tenant_id, mine in by_tenant.items():
            counters = self._rebuilding(tenant_id).counters if is_owner else self._on(tenant_id)
            await counters.rebuild(mine)
        if not is_owner:
            self._prove()

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
        tenant_id = tenant_id or rules.tenant_of(limits)
        keys = self._rebuilding(tenant_id)
        await keys.counters.restore(request_id, limits, charged_to, hold, used, lease_ttl_s)
        self._tenant_of[request_id] = tenant_id

    async def finish_rebuild(self, owner: str, epoch: str) -> None:
        for tenant_id in sorted(self._shared.entered):
            self._rebuilding(tenant_id).epoch = epoch
        attempt, self._attempt = self._attempt, 0
        if not self._shared.finish(attempt, epoch):
            raise QuotaStoreRecovering
        self.epoch = epoch

    # ------------------------------------------------------------ how

    def _prove(self) -> None:
        if self.is_connected_anew:
            self._shared.prove()
            self.is_connected_anew = False

    async def _proved(self, answer: Awaitable[T]) -> T:
        """The answer of a script; also one that the caller raises comes after the proof."""
        try:
            return await answer
        finally:
            self._prove()

    def _on(self, tenant_id: str) -> MemoryQuotaStore:
        """The tenant's counters, if they are of an epoch that goes on."""
        if not self._is_of_epoch(tenant_id):
            for joining in dict.fromkeys((PLATFORM, tenant_id)):
                self.epoch = self._shared.join(joining)
            if not self._is_of_epoch(tenant_id):
                self._shared.lose(self.epoch)
                raise QuotaStoreRecovering
        return self._shared.keys(tenant_id).counters

    def _is_of_epoch(self, tenant_id: str) -> bool:
        """Both the tenant's counters and the platform's."""
        return all(
            bool(self.epoch) and self._shared.keys(each).epoch == self.epoch for each in (tenant_id, PLATFORM)
        )

    def _rebuilding(self, tenant_id: str) -> TenantKeys:
        if not self._attempt:
            raise QuotaStoreRecovering
        keys = self._shared.rebuilding(tenant_id, self._attempt)
        if keys is None:
            self._attempt = 0
            raise QuotaStoreRecovering
        return keys

    def _find_tenant(self, request_id: str) -> str | None:
        if request_id in self._tenant_of:
            return self._tenant_of[request_id]
        for tenant_id in self._shared.read()[1]:
            if request_id in self._shared.keys(tenant_id).counters._holds:
                self._tenant_of[request_id] = tenant_id
                return tenant_id
        return None
