"""Fallback along an alias's chain: why a pool was passed over, and the price of the one taken.

A pool's price ratio is the largest over its prices (input, cached input, output) in the request's tier, so
what is taken is never dearer than allowed, however long the answer becomes. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec

from tenants.pricing.pricing import PriceBook, PriceEntry


class FallbackReason(StrEnum):
    BUDGET = "budget"
    """A limit has no room for it at this model's price, or it could cost more than its client allows."""
    CAPABILITY = "capability"
    """No server can do what the request asks for."""
    CONTEXT = "context"
    DEADLINE = "deadline"
    """It would be late, or wait longer than its client allows, or this model's queue is full."""
    HEALTH = "health"
    """No replica serves."""
    PRICE = "price"
    """Dearer than the chain allows, or without a price."""
    REQUEST = "request"
    """The model cannot take it for another reason, such as a token id beyond its vocabulary."""


class PoolTried(msgspec.Struct, frozen=True):
    model: str
    reason: FallbackReason


class Fallback(msgspec.Struct, frozen=True):
    """The pool of a chain that took a request, and why earlier ones did not."""

    asked: str
    """The alias."""
    taken: str | None
    """None: no pool took it."""
    tried: tuple[PoolTried, ...] = ()
    price_ratio: float | None = None
    price_picousd: tuple[int, int, int] | None = None
    """Per token as charged: input, cached input, output."""

    def as_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "asked": self.asked,
            "taken": self.taken,
            "tried": [{"model": attempt.model, "reason": attempt.reason.value} for attempt in self.tried],
            "price_ratio": None if self.price_ratio is None else round(self.price_ratio, 6),
        }
        if self.price_picousd is not None:
            prices = zip(("input", "cached_input", "output"), self.price_picousd, strict=True)
            shown["price_per_token_nanousd"] = {name: price / 1000 for name, price in prices}
        return shown


class NoneTook(Exception):
    """No pool of a chain took the request. `first`: the refusal of the first pool."""

    def __init__(self, first: Exception, fallback: Fallback) -> None:
        super().__init__(f"{fallback.asked}: {first}")
        self.first = first
        self.fallback = fallback


def price_ratio(first: PriceEntry, other: PriceEntry) -> float:
    """Largest ratio of a price of `other` to `first`'s; infinite if only `first` is free, 1 if both are."""
    pairs = list(zip(other.token_picousd, first.token_picousd, strict=True))
    ratios = [mine / theirs if theirs else math.inf for mine, theirs in pairs if mine or theirs]
    return max(ratios, default=1.0)


def largest_ratio(prices: PriceBook, first: str, other: str, tiers: Iterable[str]) -> float:
    """`price_ratio` of two models, the largest of several tiers. Raises `UnknownPrice`."""
    return max(price_ratio(prices.entry(first, tier), prices.entry(other, tier)) for tier in tiers)
