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


@dataclass(frozen=True, slots=True)
class LimitState:
    """One limit's counters at one instant. `available` never falls below 0."""

    limit: Limit
    used: int
    """Settled in the current window (bucket: amount - level)."""
    held: int
    available: int
    reset_s: float
    """Seconds until the window ends (bucket: until it is full)."""


@dataclass(frozen=True, slots=True)
class Granted:
    """Everything was held on every hard limit. `states` are after the hold; soft and shadow limits
    that this hold exceeds are named in `exceeded`."""

    states: tuple[LimitState, ...]
    exceeded: tuple[Limit, ...] = ()


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
    `held + used <= amount` for hard limits, always; nothing is ever negative.
    """

    async def reserve(
        self, request_id: str, limits: Sequence[Limit], amounts: Amounts, lease_ttl_s: float
    ) -> Granted | Denied:
        """Holds `amounts` on every limit, or on none. A repeat with a live `request_id` changes nothing."""
        ...

    async def top_up(self, request_id: str, amounts: Amounts) -> Granted | Denied:
        """Adds to a live hold, on the limits it was reserved on."""
        ...

    async def renew(self, request_ids: Sequence[str], lease_ttl_s: float) -> None:
        """Keeps leases alive while their requests run."""
        ...

    async def settle(self, request_id: str, actual: Amounts) -> bool:
        """Replaces the hold by what was used. Idempotent: False when there is no such hold any more."""
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
