"""How dear one model is beside another, and what an account says of a chain."""

from __future__ import annotations

import math

import pytest

from gateway.domain.fallback import Fallback, FallbackReason, PoolTried, largest_ratio, price_ratio
from tenants.errors import UnknownPrice
from tenants.pricing.pricing import FREE, Price, PriceBook, PriceEntry
from tenants.types import Tier


def entry(input_: int, cached: int, output: int, multiplier: int = 1_000) -> PriceEntry:
    return PriceEntry(Price(input_, cached, output), multiplier)


@pytest.mark.parametrize(
    ("other", "ratio"),
    [
        (entry(100, 50, 300), 1.0), (entry(150, 75, 450), 1.5), (entry(50, 25, 150), 0.5),
        (entry(100, 50, 300, 2_000), 2.0), (entry(10, 10, 900), 3.0), (entry(110, 50, 300), 1.1),
        (PriceEntry(FREE, 1_000), 0.0),
    ],
)  # fmt: skip
def test_a_model_is_as_dear_as_the_dearest_of_its_prices(other: PriceEntry, ratio: float) -> None:
    assert price_ratio(entry(100, 50, 300), other) == ratio


def test_nothing_is_cheap_beside_what_is_free() -> None:
    free = PriceEntry(FREE, 1_000)
    assert price_ratio(free, free) == 1.0
    assert price_ratio(free, entry(1, 0, 0)) == math.inf


def test_the_dearest_tier_counts_and_an_unknown_price_is_no_price() -> None:
    book = PriceBook(
        {
            ("a", Tier.STANDARD): entry(100, 50, 300),
            ("a", Tier.BATCH): entry(100, 50, 300, 500),
            ("b", Tier.STANDARD): entry(100, 50, 300),
            ("b", Tier.BATCH): entry(100, 50, 300, 900),
        }
    )
    assert largest_ratio(book, "a", "b", [Tier.STANDARD]) == 1.0
    assert largest_ratio(book, "a", "b", [Tier.STANDARD, Tier.BATCH]) == 1.8
    with pytest.raises(UnknownPrice):
        largest_ratio(book, "a", "b", [Tier.INTERACTIVE])


def test_an_account_says_which_why_and_at_what_price() -> None:
    tried = (PoolTried("a", FallbackReason.CONTEXT), PoolTried("b", FallbackReason.PRICE))
    assert Fallback("big", "c", tried, 1 / 3, (150_000, 75_000, 450_500)).as_json() == {
        "asked": "big",
        "taken": "c",
        "tried": [{"model": "a", "reason": "context"}, {"model": "b", "reason": "price"}],
        "price_ratio": 0.333333,
        "price_per_token_nanousd": {"input": 150.0, "cached_input": 75.0, "output": 450.5},
    }
    assert Fallback("big", None, tried).as_json()["taken"] is None
