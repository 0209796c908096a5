"""Prices are exact and monotone; token weights for limits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants.errors import Invalid, UnknownPrice
from tenants.pricing.price_row import PriceSet, changed
from tenants.pricing.pricing import (
    FREE,
    PLAIN,
    Price,
    PriceBook,
    PriceEntry,
    TokenWeights,
    counted,
    uniform_book,
)
from tenants.types import Amounts, Meter, Tier

BOOK = uniform_book({"small": Price(150, 75, 600), "gift": FREE})
WEIGHTED = PriceBook(
    {("m", Tier.STANDARD): PriceEntry(Price(10, 1, 40), 1_000, TokenWeights(2_500, 250, 3_000, 1_500))},
    version=7,
)
counts = st.integers(0, 1_000_000)
factors = st.integers(0, 100_000)


@pytest.mark.parametrize(
    ("tier", "cost"), [(Tier.STANDARD, 765_000), (Tier.INTERACTIVE, 1_530_000), (Tier.BATCH, 382_500)]
)
def test_the_tier_multiplies_the_list_price(tier: Tier, cost: int) -> None:
    # 1000 x 150 + 200 x 75 + 1000 x 600
    assert BOOK.cost_nanousd("small", tier, 1_200, 200, 1_000) == cost
    assert BOOK.cost_nanousd("small", tier.value, 1_200, 200, 1_000) == cost


def test_fractions_of_a_nanodollar_are_rounded_up_once() -> None:
    book = uniform_book({"m": Price(1, 1, 1)}, {Tier.INTERACTIVE: 1, Tier.STANDARD: 999, Tier.BATCH: 0})
    assert book.cost_nanousd("m", Tier.INTERACTIVE, 1, 0, 1) == 1
    assert book.cost_nanousd("m", Tier.STANDARD, 1_000, 0, 1) == 1_000
    assert book.cost_nanousd("m", Tier.BATCH, 1_000, 0, 1) == 0


def test_a_tier_may_have_a_price_of_its_own() -> None:
    book = PriceBook(
        {
            ("m", Tier.STANDARD): PriceEntry(Price(10, 5, 20), 1_000),
            ("m", Tier.BATCH): PriceEntry(Price(3, 3, 7), 1_000),
        }
    )
    assert book.cost_nanousd("m", Tier.STANDARD, 10, 0, 10) == 300
    assert book.cost_nanousd("m", Tier.BATCH, 10, 0, 10) == 100


def test_a_free_model_is_free_and_an_unknown_one_is_an_error_that_says_what_to_do() -> None:
    assert BOOK.cost_nanousd("gift", Tier.INTERACTIVE, 1_000, 0, 1_000) == 0
    with pytest.raises(UnknownPrice, match=r"'other' has no price in tier standard.*price set other.*--free"):
        BOOK.cost_nanousd("other", Tier.STANDARD, 1, 0, 1)
    with pytest.raises(UnknownPrice, match="batch"):
        WEIGHTED.cost_nanousd("m", Tier.BATCH, 1, 0, 1)
    with pytest.raises(UnknownPrice):
        counted(BOOK, "other", Tier.STANDARD, input_tokens=1, output_tokens=1)


@given(tier=st.sampled_from(Tier), prompt=counts, cached=counts, output=counts, fewer=counts)
def test_what_was_quoted_for_more_tokens_is_never_exceeded(
    tier: Tier, prompt: int, cached: int, output: int, fewer: int
) -> None:
    quoted = BOOK.cost_nanousd("small", tier, prompt, 0, output)
    actual = BOOK.cost_nanousd("small", tier, prompt, min(cached, prompt), min(fewer, output))
    assert 0 <= actual <= quoted


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("input_nanousd", partial(Price, -1, 0, 0)),
        ("output_nanousd", partial(Price, 1, 1, 1.5)),
        ("output_nanousd", partial(Price, 1, 1, 10**10)),
        ("cached_input_nanousd", partial(Price, 1, 2, 3)),
        ("input_weight", partial(TokenWeights, input=-1)),
        ("input_weight", partial(TokenWeights, input=True)),
        ("output_weight", partial(TokenWeights, output=100_001)),
        ("output_weight", partial(TokenWeights, output=0.5)),
        ("cached_input_weight", partial(TokenWeights, cached_input=1_001)),
        ("reasoning_weight", partial(TokenWeights, output=900)),
    ],
)
def test_impossible_prices_and_weights_are_refused(field: str, make: Callable[[], object]) -> None:
    with pytest.raises(Invalid) as caught:
        make()
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "arguments"),
    [("input_tokens", (-1, 0, 0)), ("cached_tokens", (5, 6, 0)), ("output_tokens", (0, 0, 10**8))],
)
def test_impossible_counts_are_refused(field: str, arguments: tuple[int, int, int]) -> None:
    with pytest.raises(Invalid) as caught:
        BOOK.cost_nanousd("small", Tier.STANDARD, *arguments)
    assert caught.value.field == field
    prompt, cached, output = arguments
    with pytest.raises(Invalid, match=field):
        counted(BOOK, "small", Tier.STANDARD, input_tokens=prompt, output_tokens=output, cached_tokens=cached)


def test_multipliers_are_bounded_and_complete() -> None:
    with pytest.raises(Invalid, match="batch"):
        uniform_book({"m": FREE}, {Tier.INTERACTIVE: 1, Tier.STANDARD: 1})
    with pytest.raises(Invalid, match="multiplier"):
        uniform_book({"m": FREE}, {Tier.INTERACTIVE: 1, Tier.STANDARD: -1, Tier.BATCH: 1})
    with pytest.raises(Invalid, match="at most"):
        uniform_book({f"m{index}": FREE for index in range(1_001)})


def test_without_weights_a_token_counts_one_and_the_cost_is_the_books() -> None:
    amounts = counted(
        BOOK, "small", "batch", input_tokens=1_200, output_tokens=1_000, cached_tokens=200, gpu_ms=5
    )
    assert amounts == Amounts(1_200, 1_000, 382_500, requests=1, gpu_ms=5)
    assert amounts.of(Meter.GPU_MS) == 5


def test_weights_count_cached_and_reasoning_tokens_apart_and_round_up_once() -> None:
    amounts = counted(
        WEIGHTED, "m", Tier.STANDARD,
        input_tokens=101, cached_tokens=100, output_tokens=3, reasoning_tokens=1, requests=0,
    )  # fmt: skip
    # 1 x 2.5 + 100 x 0.25 = 27.5 and 2 x 3 + 1 x 1.5 = 7.5; the cost knows nothing of weights.
    assert amounts == Amounts(28, 8, 1 * 10 + 100 * 1 + 3 * 40, requests=0)


@given(
    weights=st.tuples(factors, factors, factors, factors),
    tokens=st.tuples(counts, counts, counts, counts),
    more=st.tuples(counts, counts),
)
def test_what_is_held_for_ordinary_tokens_bounds_whatever_they_turn_out_to_be(
    weights: tuple[int, int, int, int], tokens: tuple[int, int, int, int], more: tuple[int, int]
) -> None:
    largest = TokenWeights(weights[0], min(weights[0], weights[1]), weights[2], min(weights[2], weights[3]))
    book = PriceBook({("m", Tier.BATCH): PriceEntry(Price(7, 3, 11), 500, largest)})
    prompt, cached, output, reasoning = tokens
    actual = counted(
        book, "m", Tier.BATCH, input_tokens=prompt, cached_tokens=min(cached, prompt), output_tokens=output,
        reasoning_tokens=min(reasoning, output),
    )  # fmt: skip
    held = counted(book, "m", Tier.BATCH, input_tokens=prompt + more[0], output_tokens=output + more[1])
    for meter in Meter:
        assert 0 <= actual.of(meter) <= held.of(meter)


def test_a_change_keeps_what_it_does_not_name() -> None:
    old = PriceEntry(Price(10, 5, 20), 2_000, TokenWeights(reasoning=500))
    assert changed(old, PriceSet(model="m"), 1) == old
    assert changed(old, PriceSet(model="m", output_nanousd=30), 1) == PriceEntry(
        Price(10, 5, 30), 2_000, old.weights
    )
    assert changed(old, PriceSet(model="m", multiplier=0, input_weight=2_000), 1) == PriceEntry(
        old.price, 0, TokenWeights(input=2_000, reasoning=500)
    )
    assert changed(old, PriceSet(model="m", free=True), 1) == PriceEntry(FREE, 2_000, old.weights)


def test_a_new_model_needs_a_whole_price_or_to_be_free() -> None:
    assert changed(None, PriceSet(model="m", input_nanousd=4, output_nanousd=9), 700) == PriceEntry(
        Price(4, 4, 9), 700, PLAIN
    )
    assert changed(None, PriceSet(model="m", free=True, multiplier=1), 700) == PriceEntry(FREE, 1, PLAIN)
    for change, field in (
        (PriceSet(model="m", input_nanousd=4), "output_nanousd"),
        (PriceSet(model="m", output_nanousd=4), "input_nanousd"),
        (PriceSet(model="m", multiplier=4), "input_nanousd"),
        (PriceSet(model="m", free=True, input_nanousd=4, output_nanousd=9), "free"),
        (
            PriceSet(model="m", input_nanousd=4, output_nanousd=9, cached_input_nanousd=5),
            "cached_input_nanousd",
        ),
    ):
        with pytest.raises(Invalid) as caught:
            changed(None, change, 700)
        assert caught.value.field == field
