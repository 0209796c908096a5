"""How does a caller hold, settle and refund budget?

One Protocol, two implementations (`memory.py`, `redis.py`) that pass one conformance suite. The
arithmetic is `rules.py`, pure; here is only the shape of the conversation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tenants.types import Amounts, Limit


class QuotaStoreUnavailable(Exception):
    """The store cannot be reached; nothing was held. Callers fail closed."""


class Overrun(ValueError):
    """`settle` was asked to charge more than was held on a hard limit; nothing was changed. Callers
    top up before they use more, so this is a bug of the caller, and a limit would have been exceeded."""

    def __init__(self, limit_name: str, held: int, actual: int) -> None:
        super().__init__(f"{actual} used but only {held} held on {limit_name}")
        self.limit_name = limit_name
        self.held = held
        self.actual = actual


@dataclass(frozen=True, slots=True)
class LimitState:
    """One limit's counters at one instant. `available` never falls below 0."""

    limit: Limit
    used: int
    """Settled in the current window (bucket: what has not flowed back yet; concurrency: 0)."""
    held: int
    available: int
    reset_s: float
    """Seconds until the window ends (lifetime: `math.inf`; bucket: until it is full; concurrency: 0)."""
    counter: str = ""
    """Name of the counter (limit and window), as in `Granted.charged_to`."""


@dataclass(frozen=True, slots=True)
class Granted:
    """Everything was held on every hard limit. `states` are after the hold; soft and shadow limits
    that this hold exceeds are named in `exceeded`."""

    states: tuple[LimitState, ...]
    exceeded: tuple[Limit, ...] = ()
    charged_to: tuple[str, ...] = ()
    """Names of the counters (limit and window) that hold this request and will be charged for it. They belong
    into the ledger's reserve row (`LedgerRow.charged_to`): from there counters are rebuilt and verified."""


@dataclass(frozen=True, slots=True)
class Denied:
    """Nothing was held. `retry_after_s` is None where waiting cannot help (a spent lifetime budget, or
    a request larger than the limit itself)."""

    limit: Limit
    wanted: int
    available: int
    retry_after_s: float | None
    states: tuple[LimitState, ...] = ()


class QuotaStore(Protocol):
    """Contract: `reserve` is atomic over all limits; holds end by `settle` or `expire`, exactly once;
    `held + used <= amount` for hard limits, always (an amount that is lowered below what is used admits
    nothing until there is room again); nothing is ever negative. A request is charged to the window in which
    it was reserved, also when it ends in a later one. Usage belongs to a limit's identity (subject, meter,
    window, tier), so changing the amount keeps it. Every method raises `QuotaStoreUnavailable` when the store
    cannot be reached, and `tenants.errors.Invalid` for amounts or limits beyond what can be counted exactly.
    """

    async def reserve(
        self, request_id: str, limits: Sequence[Limit], amounts: Amounts, lease_ttl_s: float
    ) -> Granted | Denied:
        """Holds `amounts` on every limit, or on none. A repeat with a live `request_id` changes nothing."""
        ...

    async def top_up(self, request_id: str, amounts: Amounts) -> Granted | Denied:
        """Adds `amounts` to a live hold, on the limits it was reserved on (pass `requests=0`: it is the same
        request). Raises `KeyError` when there is no such hold."""
        ...

    async def renew(self, request_ids: Sequence[str], lease_ttl_s: float) -> None:
        """Keeps leases alive while their requests run."""
        ...

    async def settle(self, request_id: str, actual: Amounts) -> bool:
        """Replaces the hold by what was used. Idempotent: False when there is no such hold any more. Raises
        `Overrun`, changing nothing, when more was used than held on a hard limit."""
        ...

    async def expire(self) -> list[str]:
        """Drops holds whose lease ran out; returns their request ids (the caller settles their ledger)."""
        ...

    async def states(self, limits: Sequence[Limit]) -> tuple[LimitState, ...]:
        """Counters now, changing nothing."""
        ...

    async def rebuild(self, used: Iterable[tuple[Limit, int]]) -> None:
        """Sets settled counters from the ledger (start of an embedded server; Redis came back empty)."""
        ...

    async def ping(self) -> None:
        """Raises `QuotaStoreUnavailable` when the store does not answer."""
        ...
