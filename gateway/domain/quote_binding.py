"""A redeemed quote: the promise that a request is held to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.domain.estimate import Estimate
from gateway.domain.quote_token import Quote
from tenants.pricing.pricing import PriceBook


async def _keep() -> None:
    """Nothing was claimed, so nothing is released."""


@dataclass(frozen=True, slots=True)
class Binding:
    quote: Quote
    prices: PriceBook
    estimate: Estimate
    release: Callable[[], Awaitable[None]] = _keep
    """Call if nothing was charged: the quote may be redeemed again."""
