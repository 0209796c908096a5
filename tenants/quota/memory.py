"""How are budgets held when one process serves alone?

The arithmetic of `rules.py` on dictionaries. No method waits between reading and writing, so on one event
loop every operation is atomic. Counters are lost with the process: the ledger rebuilds them (`rebuild`).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tenants.quota import rules
from tenants.quota.rules import Counter, WindowCounter
from tenants.quota.store import Denied, Granted, LimitState, Overrun, QuotaStoreUnavailable
from tenants.types import Amounts, Limit, Meter, Mode

MAX_HOLDS = 100_000


@dataclass(slots=True)
class _Hold:
    """What one request holds: per limit the amount, and the window it was taken from (0: no window)."""

    limits: tuple[Limit, ...]
    starts_us: tuple[int, ...]
    amounts: tuple[int, ...]
    charged_to: tuple[str, ...]
    lease_until_us: int


class MemoryQuotaStore:
    """Implements `QuotaStore` for one process. `clock` gives seconds since 1970 (calendar windows need
    it)."""

    def __init__(self, clock: Callable[[], float] = time.time, *, max_holds: int = MAX_HOLDS) -> None:
        self._clock = clock
        self._max_holds = max_holds
        self._counters: dict[str, Counter] = {}
        # Windows that are over and on which something is still held, by charge name.
        self._ended: dict[str, WindowCounter] = {}
        self._holds: dict[str, _Hold] = {}
        # (lease end, request id); renewed leases leave stale entries that `expire` skips.
        self._leases: list[tuple[int, str]] = []

    async def reserve(
        self, request_id: str, limits: Sequence[Limit], amounts: Amounts, lease_ttl_s: float
    ) -> Granted | Denied:
        """See `QuotaStore.reserve`."""
        rules.check_request(request_id, lease_ttl_s)
        rules.check_amounts(amounts)
        rules.check_limits(limits)
        now_us = self._now_us()
        if (existing := self._holds.get(request_id)) is not None:
            return self._granted(existing, now_us)
        counters = [self._advance(limit, now_us) for limit in limits]
        wanted = tuple(amounts.of(limit.meter) for limit in limits)
        denied = rules.refuse(limits, counters, wanted, now_us)
        if denied is not None:
            return replace(denied, states=await self.states(limits))
        if len(self._holds) >= self._max_holds:
            raise QuotaStoreUnavailable(f"{self._max_holds} requests hold budget already")
        held = _Hold(
            tuple(limits),
            tuple(counter.start_us if isinstance(counter, WindowCounter) else 0 for counter in counters),
            wanted,
            tuple(rules.charge_name(limit, counter) for limit, counter in zip(limits, counters, strict=True)),
            now_us + round(lease_ttl_s * 1e6),
        )
        for limit, counter, amount in zip(limits, counters, wanted, strict=True):
            self._store(limit, rules.hold(counter, amount))
        self._holds[request_id] = held
        heapq.heappush(self._leases, (held.lease_until_us, request_id))
        return self._granted(held, now_us)

    async def top_up(self, request_id: str, amounts: Amounts) -> Granted | Denied:
        """See `QuotaStore.top_up`."""
        rules.check_amounts(amounts)
        now_us = self._now_us()
        held = self._holds[request_id]
        more = tuple(
            0 if limit.meter is Meter.CONCURRENCY else amounts.of(limit.meter) for limit in held.limits
        )
        counters = [self._counter_of(held, index, now_us) for index in range(len(more))]
        denied = rules.refuse(held.limits, counters, more, now_us)
        if denied is not None:
            return replace(denied, states=await self.states(held.limits))
        for limit, counter, amount in zip(held.limits, counters, more, strict=True):
            self._store(limit, rules.hold(counter, amount))
        held.amounts = tuple(old + new for old, new in zip(held.amounts, more, strict=True))
        return self._granted(held, now_us)

    async def renew(self, request_ids: Sequence[str], lease_ttl_s: float) -> None:
        """See `QuotaStore.renew`."""
        until_us = self._now_us() + round(lease_ttl_s * 1e6)
        for request_id in request_ids:
            held = self._holds.get(request_id)
            if held is not None and until_us > held.lease_until_us:
                held.lease_until_us = until_us

    async def settle(self, request_id: str, actual: Amounts) -> bool:
        """See `QuotaStore.settle`."""
        rules.check_amounts(actual)
        held = self._holds.get(request_id)
        if held is None:
            return False
        for limit, amount in zip(held.limits, held.amounts, strict=True):
            if limit.mode is Mode.HARD and actual.of(limit.meter) > amount:
                raise Overrun(rules.identity(limit), amount, actual.of(limit.meter))
        self._end(request_id, actual)
        return True

    async def expire(self) -> list[str]:
        """See `QuotaStore.expire`."""
        now_us = self._now_us()
        ended: list[str] = []
        while self._leases and self._leases[0][0] <= now_us:
            _, request_id = heapq.heappop(self._leases)
            held = self._holds.get(request_id)
            if held is None:
                continue
            if held.lease_until_us > now_us:
                heapq.heappush(self._leases, (held.lease_until_us, request_id))
                continue
            self._end(request_id, Amounts(requests=0))
            ended.append(request_id)
        return ended

    async def states(self, limits: Sequence[Limit]) -> tuple[LimitState, ...]:
        """See `QuotaStore.states`."""
        now_us = self._now_us()
        return tuple(rules.view(limit, self._advance(limit, now_us), now_us) for limit in limits)

    async def rebuild(self, used: Iterable[tuple[Limit, int]]) -> None:
        """See `QuotaStore.rebuild`. What live requests hold in the current window stays held."""
        now_us = self._now_us()
        for limit, amount in used:
            rules.check_limits([limit])
            self._store(limit, rules.with_used(limit, self._advance(limit, now_us), amount))

    async def ping(self) -> None:
        """Always answers."""

    def check(self) -> None:
        """Self-audit: every counter's `held` is the sum of what the live holds took from it."""
        sums: dict[str, int] = {}
        for held in self._holds.values():
            for name, amount in zip(held.charged_to, held.amounts, strict=True):
                sums[name] = sums.get(name, 0) + amount
        current = {rules.counter_name(name, counter): counter for name, counter in self._counters.items()}
        for name, counter in [*current.items(), *self._ended.items()]:
            assert counter.held == sums.pop(name, 0), f"{name}: held {counter.held}"
        assert not any(sums.values()), f"held on nothing: {sums}"

    def _now_us(self) -> int:
        return round(self._clock() * 1e6)

    def _advance(self, limit: Limit, now_us: int) -> Counter:
        return rules.advance(limit, self._counters.get(rules.identity(limit)), now_us)

    def _store(self, limit: Limit, counter: Counter) -> None:
        """The only place that sets a counter: of the current window, or of one that is over."""
        name = rules.identity(limit)
        current = self._counters.get(name)
        if isinstance(counter, WindowCounter) and isinstance(current, WindowCounter):
            if counter.start_us < current.start_us:
                self._store_ended(limit, counter)
                return
            if current.start_us < counter.start_us:
                self._store_ended(limit, current)
        self._counters[name] = counter

    def _store_ended(self, limit: Limit, counter: WindowCounter) -> None:
        name = rules.charge_name(limit, counter)
        if counter.held:
            self._ended[name] = counter
        else:
            self._ended.pop(name, None)

    def _counter_of(self, held: _Hold, index: int, now_us: int) -> Counter:
        """The counter that a hold was taken from."""
        limit = held.limits[index]
        counter = self._counters[rules.identity(limit)]
        if not isinstance(counter, WindowCounter):
            return rules.advance(limit, counter, now_us)
        if counter.start_us == held.starts_us[index]:
            return counter
        over = self._ended.get(held.charged_to[index])
        return over or rules.forgotten(limit, held.starts_us[index])

    def _end(self, request_id: str, actual: Amounts) -> None:
        held = self._holds.pop(request_id)
        now_us = self._now_us()
        for index, limit in enumerate(held.limits):
            counter = self._counter_of(held, index, now_us)
            self._store(limit, rules.settle(limit, counter, held.amounts[index], actual.of(limit.meter)))
        self._trim_leases()

    def _trim_leases(self) -> None:
        # Entries of settled requests would otherwise stay until their lease would have ended.
        if len(self._leases) > 64 and len(self._leases) > 2 * len(self._holds):
            self._leases = [(held.lease_until_us, request_id) for request_id, held in self._holds.items()]
            heapq.heapify(self._leases)

    def _granted(self, held: _Hold, now_us: int) -> Granted:
        counters = [self._advance(limit, now_us) for limit in held.limits]
        pairs = list(zip(held.limits, counters, strict=True))
        return Granted(
            states=tuple(rules.view(limit, counter, now_us) for limit, counter in pairs),
            exceeded=tuple(
                limit
                for limit, counter in pairs
                if limit.mode is not Mode.HARD and rules.is_exceeded(limit, counter)
            ),
            charged_to=held.charged_to,
        )
