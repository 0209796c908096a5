"""Is the price of a request exact, monotone and known?"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants.errors import Invalid, UnknownPrice
from tenants.pricing import FREE, Price, PriceBook
from tenants.types import Tier

BOOK = PriceBook({"small": Price(150, 75, 600), "gift": FREE})
counts = st.integers(0, 1_000_000)


@pytest.mark.parametrize(
    ("tier", "cost"), [(Tier.STANDARD, 765_000), (Tier.INTERACTIVE, 1_530_000), (Tier.BATCH, 382_500)]
)
def test_the_tier_multiplies_the_list_price(tier: Tier, cost: int) -> None:
    # 1000 x 150 + 200 x 75 + 1000 x 600
    assert BOOK.cost_nanousd("small", tier, 1_200, 200, 1_000) == cost
    assert BOOK.cost_nanousd("small", tier.value, 1_200, 200, 1_000) == cost


def test_fractions_of_a_nanodollar_are_rounded_up_once() -> None:
    book = PriceBook({"m": Price(1, 1, 1)}, {Tier.INTERACTIVE: 1, Tier.STANDARD: 999, Tier.BATCH: 0})
    assert book.cost_nanousd("m", Tier.INTERACTIVE, 1, 0, 1) == 1
    assert book.cost_nanousd("m", Tier.STANDARD, 1_000, 0, 1) == 1_000
    assert book.cost_nanousd("m", Tier.BATCH, 1_000, 0, 1) == 0


def test_a_free_model_is_free_and_an_unknown_one_is_an_error() -> None:
    assert BOOK.cost_nanousd("gift", Tier.INTERACTIVE, 1_000, 0, 1_000) == 0
    with pytest.raises(UnknownPrice, match="'other'"):
        BOOK.cost_nanousd("other", Tier.STANDARD, 1, 0, 1)


@given(tier=st.sampled_from(Tier), prompt=counts, cached=counts, output=counts, fewer=counts)
def test_what_was_quoted_for_more_tokens_is_never_exceeded(
    tier: Tier, prompt: int, cached: int, output: int, fewer: int
) -> None:
    quoted = BOOK.cost_nanousd("small", tier, prompt, 0, output)
    actual = BOOK.cost_nanousd("small", tier, prompt, min(cached, prompt), min(fewer, output))
    assert 0 <= actual <= quoted


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("input_nanousd", (-1, 0, 0)),
        ("output_nanousd", (1, 1, 1.5)),
        ("output_nanousd", (1, 1, 10**10)),
        ("cached_input_nanousd", (1, 2, 3)),
    ],
)
def test_impossible_prices_are_refused(field: str, arguments: tuple[Any, Any, Any]) -> None:
    with pytest.raises(Invalid) as caught:
        Price(*arguments)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "arguments"),
    [("input_tokens", (-1, 0, 0)), ("cached_tokens", (5, 6, 0)), ("output_tokens", (0, 0, 10**8))],
)
def test_impossible_counts_are_refused(field: str, arguments: tuple[int, int, int]) -> None:
    with pytest.raises(Invalid) as caught:
        BOOK.cost_nanousd("small", Tier.STANDARD, *arguments)
    assert caught.value.field == field


def test_multipliers_are_bounded_and_complete() -> None:
    with pytest.raises(Invalid, match="batch"):
        PriceBook({}, {Tier.INTERACTIVE: 1, Tier.STANDARD: 1})
    with pytest.raises(Invalid, match="standard"):
        PriceBook({}, {Tier.INTERACTIVE: 1, Tier.STANDARD: -1, Tier.BATCH: 1})
