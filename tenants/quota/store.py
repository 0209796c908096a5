"""Protocol of quota stores: reserve, top up, settle and rebuild budget holds.

Implemented by `memory.py`, `redis.py` and, over a shared store, `fallback.py`; the arithmetic: `rules.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
from prometheus_client import Histogram

from tenants.quota.spare import SpareShares
from tenants.types import NOTHING, Amounts, Limit


class QuotaStoreUnavailable(Exception):
    """The store cannot be reached; nothing was held. Callers fail closed."""


class QuotaNodeUnavailable(QuotaStoreUnavailable):
    """A node of the store's cluster cannot be reached; others answer, and their tenants are served on."""


class QuotaStoreRecovering(QuotaStoreUnavailable):
    """The store has lost its counters: nothing is admitted or settled until they are rebuilt."""


class Overrun(ValueError):
    """More was used than held on a hard limit; nothing was changed. A bug of the caller, which must top up
    before using more. GPU-milliseconds, known only after a step, are charged beyond the hold instead."""

    def __init__(self, limit_name: str, held: int, actual: int) -> None:
        super().__init__(f"{actual} used but only {held} held on {limit_name}")
        self.limit_name = limit_name
        self.held = held
        self.actual = actual


class TooManyEndUsers(Exception):
    """A tenant's end user without counters, while as many as may be have theirs in use: nothing was held.
    `retry_after_s`: when to ask again; None: waiting does not help."""

    def __init__(self, most: int, retry_after_s: float | None) -> None:
        super().__init__(f"{most} end users have counters in use")
        self.most = most
        self.retry_after_s = retry_after_s


class Hold(msgspec.Struct, frozen=True):
    """What a request asks for when it starts: `first <= ahead <= most` in every field. Totals since the
    request began, prompt included. Windows hold `ahead` as far as there is room, at least `first`; token
    buckets hold `first`, which must fit into the burst (at most half of it for a stream at the full rate, as
    a bucket does not refill past its cap); concurrency counts the request."""

    first: Amounts
    """What must be covered before the first step."""
    ahead: Amounts
    """What is wanted on windows: the prompt and a quantile of the predicted output."""
    most: Amounts
    """The worst case: the prompt and `max_tokens`."""
    may_be_cut: bool = False
    """False: admitted only when every window has room for `most`, which is then promised: no window refuses a
    top-up up to it. True: admitted when there is room for `first`; the answer ends where the budget does
    (`on_low_budget: truncate`, or a client that asked for no particular length)."""

    @classmethod
    def whole(cls, amounts: Amounts) -> Hold:
        """The full amounts held from the start, without top-ups."""
        return cls(amounts, amounts, amounts)


class LimitState(msgspec.Struct, frozen=True):
    """One limit's counters at one instant. `available` never falls below 0."""

    limit: Limit
    used: int
    """Settled in the current window (bucket: what has not flowed back yet; concurrency: 0)."""
    held: int
    available: int
    """What another request may hold; on windows excluding what is promised (`worst_open`)."""
    reset_s: float
    """Seconds until the window ends (lifetime: `math.inf`; bucket: until it is full; concurrency: 0)."""
    counter: str = ""
    """Name of the counter (limit and window), as in `Granted.charged_to`."""
    worst_open: int = 0
    """Windows: what requests that may not be cut are promised beyond their holds."""
    refill_per_s: float | None = None
    """Buckets: what they refill at now, from the rate that was set up to the ceiling; None: no bucket."""


class Granted(msgspec.Struct, frozen=True):
    """Every hard limit holds what must be covered. `states`: after the hold; `exceeded`: soft and shadow."""

    states: tuple[LimitState, ...]
    exceeded: tuple[Limit, ...] = ()
    charged_to: tuple[str, ...] = ()
    """Names of the counters (limit and window) that hold it; rebuilds need them (`LedgerRow.charged_to`)."""
    covered: Amounts = NOTHING
    """What the request may use in total: in each field the least that a hard limit on it holds, without one
    the largest `ahead`. What a limit on total tokens holds beyond the input counts as output."""
    would_deny: tuple[Limit, ...] = ()
    """Shadow limits that would have refused this call."""


class Denied(msgspec.Struct, frozen=True):
    """Nothing more was held. `limit` is the one that blocks longest. `retry_after_s` is None where waiting
    cannot help (a spent budget, or a request larger than the limit)."""

    limit: Limit
    wanted: int
    """What was missing (a reserve: what had to fit)."""
    available: int
    retry_after_s: float | None
    states: tuple[LimitState, ...] = ()


class QuotaStore(Protocol):
    """`reserve` is atomic over all limits; holds end by `settle` or `expire`, exactly once;
    `held + used <= amount` for hard limits, always (an amount lowered below what is used, held and promised
    admits nothing until there is room again); nothing is ever negative, except that a bucket of
    GPU-milliseconds may be in debt. A request is charged to the window in which it was reserved, also when it
    goes on in a later one. Usage belongs to a limit's identity (subject, meter, window, tier, model, size of
    request), so changing the amount keeps it. Amounts are totals since the request began: a repeated call
    changes nothing.

    A tenant's end users have counters from their first request on, at most a fixed number of them at a time.
    One more takes the place of one whose counters are at rest (nothing held, nothing used in the present
    windows, buckets full), the longest first.

    Every method raises `QuotaStoreUnavailable` when the store cannot be reached, `QuotaStoreRecovering` (all
    but the rebuilding ones) when it has lost its counters, and `tenants.errors.Invalid` for amounts or limits
    beyond what can be counted exactly."""

    async def reserve(
        self,
        request_id: str,
        limits: Sequence[Limit],
        hold: Hold,
        lease_ttl_s: float,
        *,
        tenant_id: str = "",
    ) -> Granted | Denied:
        """Holds on every limit, or on none; a repeat with a live `request_id` changes nothing. `tenant_id`:
        the request's, for later limits of its tenant; empty: that of `limits`. Raises `TooManyEndUsers`."""
        ...

    async def top_up(
        self, request_id: str, used: Amounts, first: Amounts, ahead: Amounts
    ) -> Granted | Denied:
        """Raises a live hold to `first` on every limit, or on none, and on windows towards `ahead`, as far as
        there is room; never lowers one. Before that, even if `Denied`, `used` (emitted and computed so far)
        turns from a hold into a charge on token buckets, and begins to flow back. `Denied.retry_after_s`: a
        number where a bucket refills or other requests' holds are in the way, None where the window's budget
        is spent. Raises `KeyError` without such a hold, `Overrun` when more was used than a hard limit
        holds."""
        ...

    async def rebind(
        self, request_id: str, limits: Sequence[Limit], hold: Hold, used: Amounts, *, must_fit: bool
    ) -> Granted | Denied:
        """Puts a live request under the limits in force. `limits`: at least all that it holds on, which take
        the amounts, rates and modes given; on the others it holds `hold.ahead` and, unless it may be cut, is
        promised `hold.most`. Of a bucket `used` counts as charged before. `must_fit`: what it would hold on
        new and changed hard limits must have room beside all others, else `Denied`, changing nothing; False:
        room or not. A repeat changes nothing. Raises `KeyError` without such a hold, `TooManyEndUsers`."""
        ...

    async def renew(self, request_ids: Sequence[str], lease_ttl_s: float) -> None:
        """Extends the leases of running requests."""
        ...

    async def settle(self, request_id: str, actual: Amounts) -> bool:
        """Replaces the hold by what was used; what `top_up` charged to a bucket stays charged. Idempotent:
        False when there is no hold. Raises `Overrun`, changing nothing, for more than a hard limit holds."""
        ...

    async def expire(self) -> list[str]:
        """Drops holds whose lease ran out; returns their request ids, to be settled in the ledger."""
        ...

    async def overdue(self) -> list[str]:
        """Some of the requests that still hold after their lease ran out. Changes nothing."""
        ...

    @property
    def epoch(self) -> str:
        """The epoch known to this process; empty: none yet, or the counters end with this process. A grant is
        of this epoch if it was the same before and after the call."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether the store is unreachable and local slices of the limits are granted (`fallback.py`)."""
        ...

    @property
    def latency(self) -> Histogram | None:
        """Times of its answers; None: the counters are in this process."""
        ...

    @property
    def spare(self) -> SpareShares:
        """By what buckets refill above their rates."""
        ...

    async def states(self, limits: Sequence[Limit]) -> tuple[LimitState, ...]: ...

    async def end_users(self, tenant_id: str) -> int:
        """How many of a tenant's end users have counters. Changes nothing."""
        ...

    async def give_back(
        self, epoch: str, limits: Sequence[Limit], charged_to: Sequence[str], amounts: Amounts
    ) -> None:
        """Lowers what windows of `limits` in `charged_to` were charged for a settled request. The ledger has
        it under `epoch`: if that has ended, counters were rebuilt: nothing is done. Buckets refill anyway."""
        ...

    async def begin_rebuild(self, owner: str, ttl_s: float) -> bool:
        """Asks for the right to fill a store that has lost its counters (`QuotaStoreRecovering`; also a new
        one). True for exactly one `owner` at a time: it calls `rebuild`, `restore` for every open request,
        then `finish_rebuild`, all within `ttl_s`, from one snapshot of the ledger read after this call (a
        request that settles in between is in one of the two lists). Every attempt starts empty: what an
        earlier one left is dropped. False: the store has its counters, or another owner is rebuilding."""
        ...

    async def rebuild(self, used: Iterable[tuple[Limit, int]]) -> None:
        """Sets settled counters from the ledger: as the owner of a rebuild, or to repair a store in use,
        whose holds stay. Raises `QuotaStoreRecovering` while another process rebuilds."""
        ...

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
        """As the owner of a rebuild: restores what an open request held, whether there is room or not.
        Windows hold `hold.ahead` (and promise `hold.most`, unless it may be cut), buckets `hold.first` less
        `used`. `limits` not in `charged_to` (the reserve row's) are left out. A repeat changes nothing."""
        ...

    async def finish_rebuild(self, owner: str, epoch: str) -> None:
        """Ends a rebuild: the store admits from now on. `epoch`: a name never used before. Raises
        `QuotaStoreRecovering` when the right was lost to another owner, which will finish instead."""
        ...

    async def ping(self) -> None:
        """Raises `QuotaStoreUnavailable` without an answer, `QuotaStoreRecovering` without counters."""
        ...
