"""In-process quota store, for a single gateway.

The arithmetic of `rules.py` on dictionaries. No method awaits between reading and writing, so every operation
is atomic on one event loop. Counters are lost with the process and rebuilt from the ledger (`rebuild`)."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from msgspec.structs import replace
from prometheus_client import Histogram

from tenants.quota import rules
from tenants.quota.end_users import EndUsers
from tenants.quota.rules import Counter, LimitHold, WindowCounter, Wish
from tenants.quota.spare import SpareShares
from tenants.quota.store import (
    Denied,
    Granted,
    Hold,
    LimitState,
    QuotaStoreRecovering,
    QuotaStoreUnavailable,
    TooManyEndUsers,
)
from tenants.types import Amounts, Limit, LimitMode, Meter, SubjectKind

MAX_HOLDS = 100_000


@dataclass(slots=True)
class _Hold:
    """What one request holds, by limit, with the start of each window (0: no window)."""

    limits: tuple[Limit, ...]
    starts_us: tuple[int, ...]
    parts: tuple[LimitHold, ...]
    charged_to: tuple[str, ...]
    ahead: Amounts
    lease_until_us: int

    @property
    def end_user(self) -> str:
        """The end user on whose counters it is; empty: none."""
        return rules.end_user_of(self.limits)


class _State(Enum):
    NEW = "new"
    """Not rebuilt: usable, as there was nothing to lose, but a caller with a ledger may still rebuild."""
    RECOVERING = "recovering"
    READY = "ready"


class MemoryQuotaStore:
    """Implements `QuotaStore` for one process. `clock`: seconds since 1970 (calendar windows need it)."""

    latency: Histogram | None = None

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        *,
        max_holds: int = MAX_HOLDS,
        max_end_users: int = rules.MAX_END_USERS,
    ) -> None:
        self._clock = clock
        self.spare = SpareShares(clock)
        self._max_holds = max_holds
        self._max_end_users = max_end_users
        self._counters: dict[str, Counter] = {}
        self._end_users: dict[str, EndUsers] = {}
        """By tenant."""
        # Ended windows on which something is still held or promised, by charge name.
        self._ended: dict[str, WindowCounter] = {}
        self._holds: dict[str, _Hold] = {}
        # (lease end, request id); renewed leases leave stale entries that `expire` skips.
        self._leases: list[tuple[int, str]] = []
        self._state = _State.NEW
        self._owner = ""
        self._owner_until_us = 0

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
        self._check_ready()
        now_us = self._now_us()
        if (existing := self._holds.get(request_id)) is not None:
            return self._granted(existing, self._current(existing.limits, now_us), (), now_us)
        gives_way = self._who_gives_way(limits, now_us)
        counters = self._current(limits, now_us)
        wishes = [rules.wish(limit, hold) for limit in limits]
        taken = [each for each in map(rules.taken, limits, counters, wishes) if each is not None]
        would_deny: tuple[Limit, ...] = ()
        if len(taken) < len(limits):
            nothing = [LimitHold()] * len(limits)
            denied = rules.refuse(limits, counters, nothing, wishes, now_us, self._rate)
            if denied is not None:
                return replace(denied, states=await self.states(limits))
            would_deny = _would_deny(limits, counters, nothing, wishes)
            parts = map(rules.reach, limits, counters, nothing, wishes)
            taken = [
                (rules.changed(counter, LimitHold(), part), part)
                for counter, part in zip(counters, parts, strict=True)
            ]
        if len(self._holds) >= self._max_holds:
            raise QuotaStoreUnavailable(f"{self._max_holds} requests hold budget already")
        held = _Hold(
            tuple(limits),
            tuple([counter.start_us if isinstance(counter, WindowCounter) else 0 for counter in counters]),
            tuple([part for _, part in taken]),
            tuple(map(rules.charge_name, limits, counters)),
            hold.ahead,
            now_us + round(lease_ttl_s * 1e6),
        )
        if gives_way:
            for name in self._end_users[rules.tenant_of(limits)].forget(gives_way):
                self._counters.pop(name, None)
        counters = [counter for counter, _ in taken]
        for limit, counter in zip(limits, counters, strict=True):
            self._store(limit, counter)
        self._holds[request_id] = held
        self._hold_on_user(held)
        heapq.heappush(self._leases, (held.lease_until_us, request_id))
        return self._granted(held, counters, would_deny, now_us)

    async def top_up(
        self, request_id: str, used: Amounts, first: Amounts, ahead: Amounts
    ) -> Granted | Denied:
        rules.check_amounts(used)
        rules.check_rising(first, ahead)
        self._check_ready()
        now_us = self._now_us()
        held = self._holds[request_id]
        for limit, part in zip(held.limits, held.parts, strict=True):
            rules.check_covered(limit, part, used.of(limit.meter))
        self._use(held, used, now_us)
        counters = [self._counter_of(held, index, now_us) for index in range(len(held.limits))]
        wishes = [rules.wish_more(limit, first, ahead) for limit in held.limits]
        denied = rules.refuse(held.limits, counters, held.parts, wishes, now_us, self._rate)
        if denied is not None:
            return replace(denied, states=await self.states(held.limits))
        would_deny = _would_deny(held.limits, counters, held.parts, wishes)
        held.ahead = rules.largest(held.ahead, ahead)
        for index, (limit, counter) in enumerate(zip(held.limits, counters, strict=True)):
            if counter is not None:
                part = rules.reach(limit, counter, held.parts[index], wishes[index])
                self._put(held, index, rules.changed(counter, held.parts[index], part), part)
        return self._granted(held, self._current(held.limits, now_us), would_deny, now_us)

    async def rebind(
        self, request_id: str, limits: Sequence[Limit], hold: Hold, used: Amounts, *, must_fit: bool
    ) -> Granted | Denied:
        rules.check_rising(hold.ahead, hold.most)
        rules.check_limits(limits)
        self._check_ready()
        now_us = self._now_us()
        held = self._holds[request_id]
        gives_way = self._who_gives_way(limits, now_us)
        before = {limit.identity: index for index, limit in enumerate(held.limits)}
        counters: list[Counter | None] = []
        parts: list[LimitHold] = []
        to_fit: list[int] = []
        for number, limit in enumerate(limits):
            index, again = before.get(limit.identity), rules.part_again(limit, hold, used)
            if index is None:
                counters.append(self._advance(limit, now_us))
                parts.append(again)
            else:
                counter, part = self._counter_of(held, index, now_us), held.parts[index]
                if limit.is_bucket:
                    counter = self._advance(limit, now_us)  # at most the burst that it has now
                counters.append(counter and rules.changed(counter, part, LimitHold()))
                parts.append(rules.part_in_force(limit, part, again))
            if index is None or rules.is_resized(held.limits[index], limit):
                to_fit.append(number)
        if must_fit:
            chosen = [limits[number] for number in to_fit]
            wishes = [rules.wish_of(parts[number]) for number in to_fit]
            beside = [counters[number] for number in to_fit]
            nothing = [LimitHold()] * len(chosen)
            denied = rules.refuse(chosen, beside, nothing, wishes, now_us, self._rate)
            if denied is not None:
                return replace(denied, states=await self.states(limits))
        if gives_way:
            for name in self._end_users[rules.tenant_of(limits)].forget(gives_way):
                self._counters.pop(name, None)
        had_user = held.end_user
        starts = [
            held.starts_us[before[limit.identity]]
            if limit.identity in before
            else counter.start_us
            if isinstance(counter, WindowCounter)
            else 0
            for limit, counter in zip(limits, counters, strict=True)
        ]
        for limit, counter, part in zip(limits, counters, parts, strict=True):
            if counter is not None:
                self._store(limit, rules.changed(counter, LimitHold(), part))
        held.limits, held.parts, held.starts_us = tuple(limits), tuple(parts), tuple(starts)
        held.charged_to = tuple(map(rules.charge_name_at, limits, starts))
        if not had_user:
            self._hold_on_user(held)
        return self._granted(held, self._current(held.limits, now_us), (), now_us)

    async def renew(self, request_ids: Sequence[str], lease_ttl_s: float) -> None:
        self._check_ready()
        until_us = self._now_us() + round(lease_ttl_s * 1e6)
        for request_id in request_ids:
            held = self._holds.get(request_id)
            if held is not None and until_us > held.lease_until_us:
                held.lease_until_us = until_us

    async def settle(self, request_id: str, actual: Amounts) -> bool:
        rules.check_amounts(actual)
        self._check_ready()
        held = self._holds.get(request_id)
        if held is None:
            return False
        for limit, part in zip(held.limits, held.parts, strict=True):
            rules.check_covered(limit, part, actual.of(limit.meter))
        self._end(request_id, actual)
        return True

    async def expire(self) -> list[str]:
        self._check_ready()
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

    async def overdue(self) -> list[str]:
        self._check_ready()
        now_us = self._now_us()
        return [request_id for request_id, held in self._holds.items() if held.lease_until_us <= now_us]

    async def states(self, limits: Sequence[Limit]) -> tuple[LimitState, ...]:
        self._check_ready()
        now_us = self._now_us()
        return tuple(self._view(limit, self._advance(limit, now_us), now_us) for limit in limits)

    async def end_users(self, tenant_id: str) -> int:
        self._check_ready()
        return len(self._end_users.get(tenant_id, ()))

    async def ping(self) -> None:
        self._check_ready()

    @property
    def epoch(self) -> str:
        return ""

    @property
    def is_local(self) -> bool:
        return False

    async def give_back(
        self, epoch: str, limits: Sequence[Limit], charged_to: Sequence[str], amounts: Amounts
    ) -> None:
        """The epoch is always empty."""
        self._check_ready()
        for limit, start_us in rules.charged_limits(limits, charged_to):
            counter = self._counters.get(limit.identity)
            if isinstance(counter, WindowCounter) and counter.start_us != start_us:
                counter = self._ended.get(rules.charge_name_at(limit, start_us))
            if isinstance(counter, WindowCounter):
                used = max(0, counter.used - amounts.of(limit.meter))
                self._store(limit, replace(counter, used=used))

    async def begin_rebuild(self, owner: str, ttl_s: float) -> bool:
        now_us = self._now_us()
        if self._state is _State.READY or (owner != self._owner and self._owner_until_us > now_us):
            return False
        self._state, self._owner = _State.RECOVERING, owner
        self._owner_until_us = now_us + round(ttl_s * 1e6)
        for kept in (self._counters, self._ended, self._holds, self._leases, self._end_users):
            kept.clear()
        return True

    async def rebuild(self, used: Iterable[tuple[Limit, int]]) -> None:
        now_us = self._now_us()
        for limit, amount in used:
            rules.check_limits([limit])
            counter = rules.with_used(limit, self._advance(limit, now_us), amount)
            self._store(limit, counter)
            if limit.kind is SubjectKind.END_USER and limit.meter is not Meter.CONCURRENCY:
                rest_us = rules.rest_us(limit, counter)
                self._users_of(limit.tenant_id).used(limit.subject_id, limit.identity, rest_us)

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
        if self._state is _State.READY:
            raise QuotaStoreRecovering("only who rebuilds the counters restores holds")
        if request_id in self._holds:
            return
        now_us = self._now_us()
        charged = rules.charged_limits(limits, charged_to)
        held = _Hold(
            tuple(limit for limit, _ in charged),
            tuple(start_us for _, start_us in charged),
            tuple(rules.part_again(limit, hold, used) for limit, _ in charged),
            tuple(rules.charge_name_at(limit, start_us) for limit, start_us in charged),
            hold.ahead,
            now_us + round(lease_ttl_s * 1e6),
        )
        for index, limit in enumerate(held.limits):
            counter = self._restored_counter(held, index, now_us)
            self._store(limit, rules.changed(counter, LimitHold(), held.parts[index]))
        self._holds[request_id] = held
        self._hold_on_user(held)
        heapq.heappush(self._leases, (held.lease_until_us, request_id))

    async def finish_rebuild(self, owner: str, epoch: str) -> None:
        """The epoch is not stored: it ends with this process."""
        if self._state is _State.RECOVERING and owner != self._owner:
            raise QuotaStoreRecovering("somebody else rebuilds the counters")
        self._state = _State.READY

    def check(self) -> None:
        """Asserts that every counter's held and promised amounts are the sums over the live holds."""
        sums: dict[str, tuple[int, int]] = {}
        for held in self._holds.values():
            for name, part in zip(held.charged_to, held.parts, strict=True):
                holding, promised = sums.get(name, (0, 0))
                sums[name] = holding + part.held, promised + part.open
        current = {rules.counter_name(name, counter): counter for name, counter in self._counters.items()}
        for name, counter in [*current.items(), *self._ended.items()]:
            promised = counter.worst_open if isinstance(counter, WindowCounter) else 0
            expected = sums.pop(name, (0, 0))
            assert (counter.held, promised) == expected, f"{name}: {counter}, not {expected}"
        assert not any(map(any, sums.values())), f"held on nothing: {sums}"

    def _users_of(self, tenant_id: str) -> EndUsers:
        return self._end_users.setdefault(tenant_id, EndUsers())

    def _who_gives_way(self, limits: Sequence[Limit], now_us: int) -> str:
        """The end user whose counters a new one replaces; empty: there is room. Raises `TooManyEndUsers`."""
        user = rules.end_user_of(limits)
        if not user:
            return ""
        users = self._users_of(rules.tenant_of(limits))
        if user in users:
            return ""
        if now_us < users.forgotten_us:
            raise TooManyEndUsers(self._max_end_users, rules.until_rest_s(users.forgotten_us, now_us))
        if len(users) < self._max_end_users:
            return ""
        first = users.longest_at_rest()
        if first is None or first[0] > now_us:
            raise TooManyEndUsers(self._max_end_users, rules.until_rest_s(first and first[0], now_us))
        return first[1]

    def _hold_on_user(self, held: _Hold) -> None:
        if user := held.end_user:
            names = [limit.identity for limit in held.limits if limit.kind is SubjectKind.END_USER]
            self._users_of(rules.tenant_of(held.limits)).holds(user, names)

    def _check_ready(self) -> None:
        if self._state is _State.RECOVERING:
            raise QuotaStoreRecovering("the counters are being rebuilt from the ledger")

    def _restored_counter(self, held: _Hold, index: int, now_us: int) -> Counter:
        """The counter of a restored hold. An ended window is taken as used up, as what is left is unknown."""
        limit, start_us, name = held.limits[index], held.starts_us[index], held.charged_to[index]
        current, known = self._advance(limit, now_us), self._counters.get(limit.identity)
        if limit.window is None:
            return current
        for found in (known, current):
            if isinstance(found, WindowCounter) and found.start_us == start_us:
                return found
        self._store(limit, current)
        _, end_us = rules.window_bounds_us(limit.window, limit.time_zone, start_us)
        return self._ended.get(name) or WindowCounter(start_us, end_us, limit.amount, 0, 0)

    def _now_us(self) -> int:
        return round(self._clock() * 1e6)

    def _advance(self, limit: Limit, now_us: int) -> Counter:
        return rules.advance(limit, self._counters.get(limit.identity), now_us, self.spare.known)

    def _view(self, limit: Limit, counter: Counter, now_us: int) -> LimitState:
        return rules.view(limit, counter, now_us, self.spare.known)

    def _rate(self, limit: Limit) -> int:
        return rules.rate_now(limit, self.spare.known)

    def _store(self, limit: Limit, counter: Counter) -> None:
        """Sets a counter of the current or an ended window; the only place that does."""
        name = limit.identity
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
        if counter.held or counter.worst_open:
            self._ended[name] = counter
        else:
            self._ended.pop(name, None)

    def _counter_of(self, held: _Hold, index: int, now_us: int) -> Counter | None:
        """The counter that a hold was taken from; None: of a window that has ended and was dropped."""
        limit = held.limits[index]
        counter = self._counters[limit.identity]
        if not isinstance(counter, WindowCounter):
            return rules.advance(limit, counter, now_us, self.spare.known)
        if counter.start_us == held.starts_us[index]:
            return counter
        return self._ended.get(held.charged_to[index])

    def _put(self, held: _Hold, index: int, counter: Counter, part: LimitHold) -> None:
        self._store(held.limits[index], counter)
        held.parts = (*held.parts[:index], part, *held.parts[index + 1 :])

    def _use(self, held: _Hold, used: Amounts, now_us: int) -> None:
        for index, limit in enumerate(held.limits):
            counter = self._counter_of(held, index, now_us)
            if counter is not None:
                self._put(held, index, *rules.use(limit, counter, held.parts[index], used.of(limit.meter)))

    def _end(self, request_id: str, actual: Amounts) -> None:
        held = self._holds.pop(request_id)
        now_us = self._now_us()
        user = held.end_user
        users = self._users_of(rules.tenant_of(held.limits)) if user else EndUsers()
        for index, limit in enumerate(held.limits):
            counter = self._counter_of(held, index, now_us)
            if counter is not None:
                part = held.parts[index]
                counter = rules.settle(limit, counter, part, actual.of(limit.meter))
                self._store(limit, counter)
                if limit.kind is SubjectKind.END_USER and self._counters[limit.identity] == counter:
                    users.used(user, limit.identity, rules.rest_us(limit, counter))
        if user:
            users.released(user)
        self._trim_leases()

    def _trim_leases(self) -> None:
        # Drops entries of settled requests before their leases would have ended.
        if len(self._leases) > 64 and len(self._leases) > 2 * len(self._holds):
            self._leases = [(held.lease_until_us, request_id) for request_id, held in self._holds.items()]
            heapq.heapify(self._leases)

    def _current(self, limits: Sequence[Limit], now_us: int) -> list[Counter]:
        return [self._advance(limit, now_us) for limit in limits]

    def _granted(
        self, held: _Hold, counters: Sequence[Counter], would_deny: tuple[Limit, ...], now_us: int
    ) -> Granted:
        pairs = list(zip(held.limits, counters, strict=True))
        return Granted(
            states=tuple([self._view(limit, counter, now_us) for limit, counter in pairs]),
            exceeded=tuple(
                [
                    limit
                    for limit, counter in pairs
                    if limit.mode is not LimitMode.HARD and rules.is_exceeded(limit, counter)
                ]
            ),
            charged_to=held.charged_to,
            covered=rules.covered(held.limits, held.parts, held.ahead),
            would_deny=would_deny,
        )


def _would_deny(
    limits: Sequence[Limit],
    counters: Sequence[Counter | None],
    parts: Sequence[LimitHold],
    wishes: Sequence[Wish],
) -> tuple[Limit, ...]:
    return tuple(
        limit
        for limit, counter, part, wish in zip(limits, counters, parts, wishes, strict=True)
        if limit.mode is LimitMode.SHADOW and rules.is_short(limit, counter, part, wish)
    )
