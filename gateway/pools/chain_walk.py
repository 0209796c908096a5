"""A request's way along the chain of its alias.

A pool is passed over before anything is held. A refusal that any pool would repeat ends the walk.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from gateway.budget.holds import BudgetDenied
from gateway.dispatch.admission import COST_HEADER, EstimateExceeds, NotInTime
from gateway.dispatch.dispatcher import NoEngineAvailable, QueueRefused
from gateway.domain.fallback import Fallback, FallbackReason, NoneTook, PoolTried, largest_ratio
from gateway.errors import ApiError, ServerLacks
from tenants.errors import UnknownPrice
from tenants.nouns.alias import Chain
from tenants.pricing.pricing import PriceBook
from tenants.types import Tier

Request = TypeVar("Request")
OnPassed = Callable[[str, FallbackReason], None]


def nothing_passed(pool: str, reason: FallbackReason) -> None:
    """Does nothing."""


class TooDear(Exception):
    """The pool's prices are beyond what the chain allows."""


def reason_of(refusal: Exception, *, was_parsed: bool) -> FallbackReason | None:
    """Why a pool is passed over; None: the walk ends. `was_parsed`: an earlier model could take it."""
    match refusal:
        case BudgetDenied():
            return FallbackReason.BUDGET
        case NotInTime() | QueueRefused():
            return FallbackReason.DEADLINE
        case EstimateExceeds(header=header):
            return FallbackReason.BUDGET if header == COST_HEADER else FallbackReason.DEADLINE
        case NoEngineAvailable():
            return FallbackReason.HEALTH
        case TooDear():
            return FallbackReason.PRICE
        case ServerLacks() | ApiError(code="capability_unavailable"):
            return FallbackReason.CAPABILITY
        case ApiError(code="context_length_exceeded"):
            return FallbackReason.CONTEXT
        case ApiError(status=413):
            return FallbackReason.REQUEST
        case ApiError() if was_parsed:
            return FallbackReason.REQUEST
    return None


class ChainWalk(Generic[Request]):
    """One request's walk. Use from one event loop."""

    def __init__(
        self,
        asked: str,
        chain: Chain,
        tiers: Sequence[Tier],
        prices: PriceBook,
        *,
        parse: Callable[[str], Awaitable[Request]],
        has_engine: Callable[[str], bool],
        on_passed: OnPassed,
        only: str | None,
    ) -> None:
        """`tiers`: for comparing prices; `parse`: the request for a pool; raises `ApiError`, `BudgetDenied`,
        or `NoEngineAvailable` for one that never served; `only`: the one pool that may take it."""
        self.prices = prices
        self._asked = asked
        self._chain = chain
        self._tiers = tiers
        self._parse = parse
        self._has_engine = has_engine
        self._on_passed = on_passed
        self._left = [only] if only in chain.pools else list(chain.pools)
        self._tried: list[PoolTried] = []
        self._first_refusal: Exception | None = None
        self._was_parsed = False

    @property
    def fallback(self) -> Fallback:
        """Raises `UnknownPrice`."""
        pool = self._left[0]
        return Fallback(self._asked, pool, tuple(self._tried), self._ratio(pool))

    async def first(self) -> Request:
        """The request for the first pool that may take it. Raises as `onward`."""
        try:
            return await self._parsed()
        except (ApiError, NoEngineAvailable, BudgetDenied) as error:
            refusal = error
        return await self.onward(refusal)

    async def onward(self, refusal: Exception) -> Request:
        """The request for the next pool that may take it, after a refusal. Raises the refusal if the chain
        does not go on after it, `NoneTook` if no pool is left."""
        while True:
            self._pass(refusal)
            try:
                self._require_price(self._left[0])
                if not self._has_engine(self._left[0]):
                    raise NoEngineAvailable
                return await self._parsed()
            except (ApiError, NoEngineAvailable, BudgetDenied, TooDear) as error:
                refusal = error

    def _pass(self, refusal: Exception) -> None:
        reason = reason_of(refusal, was_parsed=self._was_parsed)
        if reason is None:
            raise refusal
        refusal.__traceback__ = None  # its frames hold the request, which holds this walk
        self._first_refusal = self._first_refusal or refusal
        pool = self._left.pop(0)
        self._tried.append(PoolTried(pool, reason))
        self._on_passed(pool, reason)
        if not self._left:
            raise NoneTook(self._first_refusal, Fallback(self._asked, None, tuple(self._tried)))

    async def _parsed(self) -> Request:
        request = await self._parse(self._left[0])
        self._was_parsed = True
        return request

    def _require_price(self, pool: str) -> None:
        """Raises `TooDear`, also for a pool without comparable prices."""
        try:
            if self._ratio(pool) > self._chain.max_price:
                raise TooDear(pool)
        except UnknownPrice:
            raise TooDear(pool) from None

    def _ratio(self, pool: str) -> float:
        return largest_ratio(self.prices, self._chain.pools[0], pool, self._tiers)
