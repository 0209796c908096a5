"""Quota store that falls back to local slices of the limits while the shared store is unavailable
(`store_failure: local`). Every call passes through while the shared store answers. During an outage:

- New requests fit into the slice: `local_slice` per cent of a limit's amount (and rate), at most what was
  available when the limit was last seen; zero of a limit that was never seen. So with G gateways a hard
  window is exceeded by at most G slices, and not at all where nothing was available when last seen.
- Running requests keep their holds and windows' promises (`Hold.most`). Only what a top-up asks for beyond
  them comes from the slice.
- Ended requests are settled by their ledger row, which is durable before `settle` is called here.

When the store answers again its counters include none of this, so its epoch is ended (`lose`) and the
counters are rebuilt from the ledger (`gateway/budget/counter_rebuild.py`). Until this process knows a later
epoch it counts locally under the old one's name: the ledger accepts its rows only until the rebuild reads it.
So a local grant is either in the rebuilt counters or refused: counted once.

Nothing is admitted while a store that answers has lost its counters, or if it was never ready here."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from msgspec import structs
from prometheus_client import Histogram

from tenants.quota import rules
from tenants.quota.memory import MemoryQuotaStore
from tenants.quota.spare import SpareShares
from tenants.quota.store import (
    Denied,
    Granted,
    Hold,
    LimitState,
    QuotaStore,
    QuotaStoreRecovering,
    QuotaStoreUnavailable,
)
from tenants.types import Amounts, Limit, LimitMode, Meter

MAX_SEEN = 200_000
"""Limits whose last state is remembered; on others nothing is admitted."""
MAX_RUNNING = 200_000
"""Requests whose hold is remembered; a top-up of others waits for the store."""
MAX_ENDED = 100_000
"""Requests that may be settled during an outage; the settlement of later ones waits for the store."""

log = logging.getLogger("fairgate.quota.fallback")

Result = TypeVar("Result")


class SharedStore(QuotaStore, Protocol):
    """A `QuotaStore` whose counters can be invalidated, so that local grants are filled in by a rebuild."""

    async def lose(self, epoch: str) -> None:
        """Ends `epoch` if it is the current one: the counters must be rebuilt."""
        ...

    def remember(self, request_id: str, tenant_id: str) -> None: ...


def slice_of(limit: Limit, slice_percent: int, available: int) -> Limit | None:
    """The part of a hard limit that one gateway may grant locally; soft and shadow limits stay whole.
    `available`: as last seen, for a bucket only its initial level. None: a bucket too small to be sliced."""
    if limit.mode is not LimitMode.HARD:
        return limit
    amount = limit.amount * slice_percent // 100
    if limit.rate_per_s is None:
        return replace(limit, amount=min(amount, available))
    # What capacity is spare is not known without the store: the slice is of what was promised.
    rate_per_s = limit.rate_per_s * slice_percent / 100
    part = replace(limit, amount=amount, rate_per_s=rate_per_s, ceiling_per_s=None)
    return part if amount and rules.rate_per_ms(part) else None


def beyond(amounts: Amounts, base: Amounts) -> Amounts:
    return Amounts(*(max(0, getattr(amounts, name) - getattr(base, name)) for name in rules.FIELDS))


def together(one: Amounts, other: Amounts) -> Amounts:
    return Amounts(*(getattr(one, name) + getattr(other, name) for name in rules.FIELDS))


@dataclass(slots=True)
class _Running:
    """What a request of this process asked for and holds in the shared store."""

    limits: tuple[Limit, ...]
    most: Amounts
    may_be_cut: bool
    covered: Amounts
    epoch: str
    """The store's epoch of `covered`; after a rebuild the hold may differ."""
    tenant_id: str

    def sliced(self, ahead: Amounts) -> list[Limit]:
        """The limits on which a top-up needs the slice: all but windows that have promised it."""
        return [
            limit
            for limit in self.limits
            if limit.mode is LimitMode.HARD
            and limit.meter is not Meter.CONCURRENCY
            and (self.may_be_cut or limit.window is None or ahead.of(limit.meter) > self.most.of(limit.meter))
        ]


@dataclass(slots=True)
class _Outage:
    """Local counters during an outage of the store."""

    epoch: str
    local: MemoryQuotaStore
    seen: dict[str, int]
    """What was last seen available, by a limit's identity."""
    started: set[str] = field(default_factory=set)
    """Buckets whose initial level was set."""
    base: dict[str, Amounts] = field(default_factory=dict)
    """Holds in the shared store of the requests in `local`."""
    ended: dict[str, tuple[Amounts, str | None]] = field(default_factory=dict)
    """Settled amounts and tenants (None: not known); already in the ledger."""


class FallbackQuotaStore:
    """`clock` gives seconds since 1970. One object a gateway process; use from one event loop."""

    def __init__(
        self,
        shared: SharedStore,
        slice_percent: int,
        clock: Callable[[], float] = time.time,
        *,
        max_end_users: int = rules.MAX_END_USERS,
    ) -> None:
        """Raises ValueError for a slice that is not between 1 and 100 per cent."""
        if not 1 <= slice_percent <= 100:
            raise ValueError(f"slice_percent must be between 1 and 100, not {slice_percent}")
        self._shared = shared
        self._slice_percent = slice_percent
        self._clock = clock
        self._max_end_users = max_end_users
        self._was_ready = False
        self._outage: _Outage | None = None
        self._seen: OrderedDict[str, int] = OrderedDict()
        self._running: OrderedDict[str, _Running] = OrderedDict()

    @property
    def is_local(self) -> bool:
        return self._outage is not None

    @property
    def epoch(self) -> str:
        """During an outage the epoch in which it began, though the store may be in a later one."""
        return self._shared.epoch if self._outage is None else self._outage.epoch

    @property
    def spare(self) -> SpareShares:
        """Slices refill at their rates: what they are of was promised."""
        return self._shared.spare

    @property
    def latency(self) -> Histogram | None:
        return self._shared.latency

    async def reserve(
        self,
        request_id: str,
        limits: Sequence[Limit],
        hold: Hold,
        lease_ttl_s: float,
        *,
        tenant_id: str = "",
    ) -> Granted | Denied:
        """Raises `QuotaStoreUnavailable` where a slice (not a bucket's) is full: the budget is unknown."""
        if self._outage is None:
            try:
                answer = await self._shared.reserve(
                    request_id, limits, hold, lease_ttl_s, tenant_id=tenant_id
                )
            except QuotaStoreUnavailable as error:
                self._fall_back(error)
            else:
                self._note_seen(answer.states)
                self._note_running(request_id, answer, limits, hold, tenant_id)
                return answer
        answer = await self._reserve_locally(request_id, limits, hold, lease_ttl_s)
        self._note_running(request_id, answer, limits, hold, tenant_id)
        return answer

    async def top_up(
        self, request_id: str, used: Amounts, first: Amounts, ahead: Amounts
    ) -> Granted | Denied:
        """Slices as in `reserve`."""
        if self._outage is None:
            try:
                answer = await self._shared.top_up(request_id, used, first, ahead)
            except QuotaStoreUnavailable as error:
                self._fall_back(error)
            else:
                self._note_seen(answer.states)
                running = self._running.get(request_id)
                if running is not None and isinstance(answer, Granted):
                    running.covered, running.epoch = answer.covered, self._shared.epoch
                return answer
        return await self._top_up_locally(request_id, used, first, ahead)

    async def rebind(
        self, request_id: str, limits: Sequence[Limit], hold: Hold, used: Amounts, *, must_fit: bool
    ) -> Granted | Denied:
        """Raises `QuotaStoreUnavailable` during an outage."""
        answer = await self._pass(
            lambda: self._shared.rebind(request_id, limits, hold, used, must_fit=must_fit)
        )
        running = self._running.get(request_id)
        if running is not None and isinstance(answer, Granted):
            running.limits, running.covered, running.epoch = tuple(limits), answer.covered, self._shared.epoch
        return answer

    async def settle(self, request_id: str, actual: Amounts) -> bool:
        """During an outage the ledger row is decisive: counters are rebuilt from it."""
        if self._outage is None:
            try:
                settled = await self._shared.settle(request_id, actual)
            except QuotaStoreUnavailable as error:
                self._fall_back(error)
            else:
                self._running.pop(request_id, None)
                return settled
        return await self._settle_locally(request_id, actual)

    async def renew(self, request_ids: Sequence[str], lease_ttl_s: float) -> None:
        """During an outage leases need no renewal: live requests hold again after the rebuild."""
        await self._pass(lambda: self._shared.renew(request_ids, lease_ttl_s))

    async def expire(self) -> list[str]:
        return await self._pass(self._shared.expire)

    async def overdue(self) -> list[str]:
        return await self._pass(self._shared.overdue)

    async def states(self, limits: Sequence[Limit]) -> tuple[LimitState, ...]:
        """Never shows slices."""
        states = await self._pass(lambda: self._shared.states(limits))
        self._note_seen(states)
        return states

    async def ping(self) -> None:
        """Ends an outage; raises `QuotaStoreRecovering` until the counters were rebuilt since it began."""
        try:
            await self._shared.ping()
        except QuotaStoreRecovering:
            raise
        except QuotaStoreUnavailable as error:
            if self._outage is None:
                self._fall_back(error)
            raise
        if self._outage is not None:
            if self._shared.epoch == self._outage.epoch:
                await self._shared.lose(self._outage.epoch)
                raise QuotaStoreRecovering("what was admitted without the quota store is not in it yet")
            await self._end_outage(self._outage)
        self._was_ready = True

    async def end_users(self, tenant_id: str) -> int:
        return await self._pass(lambda: self._shared.end_users(tenant_id))

    async def give_back(
        self, epoch: str, limits: Sequence[Limit], charged_to: Sequence[str], amounts: Amounts
    ) -> None:
        """During an outage the ledger row is enough: counters are rebuilt from it."""
        if self._outage is None:
            await self._shared.give_back(epoch, limits, charged_to, amounts)

    async def begin_rebuild(self, owner: str, ttl_s: float) -> bool:
        is_ours = await self._shared.begin_rebuild(owner, ttl_s)
        if is_ours and self._outage is not None:
            # Their rows are included in what is read from the ledger from now on.
            self._outage.ended.clear()
        return is_ours

    async def rebuild(self, used: Iterable[tuple[Limit, int]]) -> None:
        await self._shared.rebuild(used)

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
        await self._shared.restore(
            request_id, limits, charged_to, hold, used, lease_ttl_s, tenant_id=tenant_id
        )

    async def finish_rebuild(self, owner: str, epoch: str) -> None:
        await self._shared.finish_rebuild(owner, epoch)
        if self._outage is not None:
            await self._end_outage(self._outage)
        self._was_ready = True

    # ------------------------------------------------------------ begin and end of an outage

    def _fall_back(self, error: QuotaStoreUnavailable) -> None:
        """Starts an outage; raises `error` where local grants are not allowed."""
        if isinstance(error, QuotaStoreRecovering) or not self._was_ready:
            raise error
        if self._outage is None:
            log.warning(
                "the quota store is away: %d %% of each limit is given out locally", self._slice_percent
            )
            local = MemoryQuotaStore(self._clock, max_end_users=self._max_end_users)
            self._outage = _Outage(self._shared.epoch, local, dict(self._seen))

    async def _end_outage(self, outage: _Outage) -> None:
        """Ends the outage, as the store's counters are of a later epoch. Settles requests that ended here
        after the rebuild read the ledger and are still held there."""
        while outage.ended:
            request_id, (actual, tenant_id) = next(iter(outage.ended.items()))
            if tenant_id is not None:
                self._shared.remember(request_id, tenant_id)
            await self._shared.settle(request_id, actual)
            outage.ended.pop(request_id, None)
        self._outage = None
        # Seen before the outage: the next one must not grant the same room again.
        self._seen.clear()
        log.info("the quota store is back, with everything that was given out locally")

    async def _pass(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        """Calls the shared store only. Raises `QuotaStoreUnavailable` during an outage."""
        if self._outage is None:
            try:
                return await ask()
            except QuotaStoreUnavailable as error:
                self._fall_back(error)
        raise QuotaStoreUnavailable("the quota store is away")

    def _note_seen(self, states: Iterable[LimitState]) -> None:
        if self._outage is not None:
            return
        for state in states:
            name = state.limit.identity
            self._seen[name] = state.available
            self._seen.move_to_end(name)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    def _note_running(
        self, request_id: str, answer: Granted | Denied, limits: Sequence[Limit], hold: Hold, tenant_id: str
    ) -> None:
        if isinstance(answer, Granted) and request_id not in self._running:
            self._running[request_id] = _Running(
                tuple(limits),
                hold.most,
                hold.may_be_cut,
                answer.covered,
                self.epoch,
                tenant_id or rules.tenant_of(limits),
            )
            if len(self._running) > MAX_RUNNING:
                self._running.popitem(last=False)

    # ------------------------------------------------------------ local counting

    async def _reserve_locally(
        self, request_id: str, limits: Sequence[Limit], hold: Hold, lease_ttl_s: float
    ) -> Granted | Denied:
        outage = self._outage
        assert outage is not None
        slices = await self._slices(outage, limits)
        answer = await outage.local.reserve(request_id, slices, hold, lease_ttl_s)
        if isinstance(answer, Granted):
            outage.base[request_id] = Amounts(requests=0)
        return _with_whole_limits(answer, limits)

    async def _top_up_locally(
        self, request_id: str, used: Amounts, first: Amounts, ahead: Amounts
    ) -> Granted | Denied:
        """Holds what exceeds the hold in the shared store, the `base`, separately on the slice."""
        outage, running = self._outage, self._running.get(request_id)
        assert outage is not None
        if running is None:
            raise QuotaStoreUnavailable("the quota store is away, and nobody here knows of this hold")
        base = outage.base.get(request_id)
        if base is None:
            if running.epoch != outage.epoch:
                raise QuotaStoreUnavailable(
                    "the quota store is away, and what this request holds is not known"
                )
            base, limits = running.covered, running.sliced(ahead)
            slices = await self._slices(outage, limits)
            hold = Hold(beyond(first, base), beyond(ahead, base), beyond(ahead, base), may_be_cut=True)
            answer = await outage.local.reserve(request_id, slices, hold, rules.MAX_LEASE_S)
            if isinstance(answer, Granted):
                outage.base[request_id] = base
        else:
            answer = await outage.local.top_up(
                request_id, beyond(used, base), beyond(first, base), beyond(ahead, base)
            )
        answer = _with_whole_limits(answer, running.limits)
        return (
            answer
            if isinstance(answer, Denied)
            else structs.replace(answer, covered=together(base, answer.covered))
        )

    async def _settle_locally(self, request_id: str, actual: Amounts) -> bool:
        outage = self._outage
        assert outage is not None
        rules.check_amounts(actual)
        is_first = request_id not in outage.ended
        if is_first and len(outage.ended) >= MAX_ENDED:
            raise QuotaStoreUnavailable("the quota store is away, and too much has ended meanwhile")
        if (base := outage.base.get(request_id)) is not None:
            await outage.local.settle(request_id, beyond(actual, base))
            del outage.base[request_id]
        running = self._running.pop(request_id, None)
        outage.ended[request_id] = actual, running.tenant_id if running else None
        return is_first

    async def _slices(self, outage: _Outage, limits: Sequence[Limit]) -> list[Limit]:
        """Raises `QuotaStoreUnavailable` where a limit is too small to be sliced."""
        slices: list[Limit] = []
        for limit in limits:
            name = limit.identity
            available = outage.seen.get(name, 0)
            part = slice_of(limit, self._slice_percent, available)
            if part is None:
                raise QuotaStoreUnavailable(f"the quota store is away, and {name} is too small for a slice")
            if part.is_bucket and part.mode is LimitMode.HARD and name not in outage.started:
                outage.started.add(name)
                await outage.local.rebuild([(part, max(0, part.amount - available))])
            slices.append(part)
        return slices


def _with_whole_limits(answer: Granted | Denied, limits: Sequence[Limit]) -> Granted | Denied:
    """The answer with the limits in place of their slices. Raises `QuotaStoreUnavailable` where a slice is
    used up and will not refill: the limit itself may have room."""
    whole = {limit.identity: limit for limit in limits}
    states = tuple(structs.replace(state, limit=whole[state.limit.identity]) for state in answer.states)
    if isinstance(answer, Granted):
        return structs.replace(answer, states=states)
    if not answer.limit.is_bucket or answer.retry_after_s is None:
        raise QuotaStoreUnavailable(
            "the quota store is away, and what may be given out without it is used up"
        )
    return structs.replace(answer, limit=whole[answer.limit.identity], states=states)
