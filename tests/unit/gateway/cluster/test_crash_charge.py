"""Charges for requests whose gateway died, and the source named in the row."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from engine.messages import SequenceOutcome
from gateway.cluster.crash_charge import reckon
from gateway.domain.outcomes import RequestOutcome
from tenants.errors import UnknownPrice
from tenants.ledger.rows import LedgerRow, OpenRequest
from tenants.pricing.pricing import Price, PriceBook, PriceEntry, TokenWeights, uniform_book
from tenants.types import Amounts, Tier

BOOK = uniform_book({"m": Price(100, 50, 300)})
RESERVE = LedgerRow(
    "r", "reserve", "ten", "prj", "key", "gw_dead", "standard", "m", Amounts(10, 40, 13_000, 1), "",
    datetime(2025, 1, 1, tzinfo=UTC), {"prompt_tokens": [10], "choices": 1},
)  # fmt: skip


def top_up(number: int, more: int, used: list[int]) -> LedgerRow:
    amounts = Amounts(0, more, 300 * more, 0)
    return replace(RESERVE, kind="top_up", number=number, amounts=amounts, detail={"used": used})


def outcome(emitted: int, index: int = 0, **fields: Any) -> SequenceOutcome:
    return SequenceOutcome(f"r.{index}", "r", "ten", "cancelled", 10, 0, 10, emitted, index=index, **fields)


def test_the_engines_word_is_charged_to_the_token() -> None:
    found = reckon(OpenRequest(RESERVE), [outcome(33, gpu_us=1_500)], BOOK)
    assert found.outcome is RequestOutcome.RECOVERED
    assert found.charged == found.counted == Amounts(10, 33, 10 * 100 + 33 * 300, 1, 2)
    assert (found.detail["basis"], found.detail["uncertain_tokens"]) == ("engine", 0)
    assert found.detail["reserved_by"] == "gw_dead"


def test_without_an_engine_the_last_report_is_charged_and_the_doubt_is_named() -> None:
    request = OpenRequest(
        RESERVE, (top_up(1, 20, [10, 30, 10_000, 1, 0]), top_up(2, 20, [10, 55, 17_500, 1, 7]))
    )
    found = reckon(request, [], BOOK)
    assert found.outcome is RequestOutcome.LOST
    assert found.charged == found.counted == Amounts(10, 55, 17_500, 1, 7)
    assert (found.detail["basis"], found.detail["uncertain_tokens"]) == ("last_report", 40 + 20 + 20 - 55)


def test_the_last_report_bills_tokens_as_they_were_and_counts_them_as_limits_do() -> None:
    reported = {"used": [5, 138, 17_500, 1, 7], "tokens": [10, 55, 17_500, 1, 7]}
    request = OpenRequest(RESERVE, (replace(top_up(1, 110, []), detail=reported),))
    found = reckon(request, [], BOOK)
    assert found.charged == Amounts(10, 55, 17_500, 1, 7)
    assert found.counted == Amounts(5, 138, 17_500, 1, 7)


def test_what_was_never_topped_up_and_no_engine_knows_is_charged_nothing() -> None:
    found = reckon(OpenRequest(RESERVE), [], BOOK)
    assert found.charged == found.counted == Amounts(requests=0)
    assert found.detail["uncertain_tokens"] == 40


def test_limits_are_never_charged_more_than_was_held() -> None:
    found = reckon(OpenRequest(RESERVE), [outcome(50)], BOOK)
    assert found.counted == Amounts(10, 40, 13_000, 1)
    assert found.charged == Amounts(10, 50, 13_000, 1), "the row says what was emitted"


def test_weighted_tokens_are_counted_beside_the_real_ones() -> None:
    entry = PriceEntry(Price(100, 50, 300), 1_000, TokenWeights(input=1_000, output=2_000))
    book = PriceBook({("m", Tier.STANDARD): entry})
    found = reckon(OpenRequest(RESERVE), [outcome(15)], book)
    assert found.charged.output_tokens == 15
    assert found.counted.output_tokens == 30


def test_a_price_that_is_gone_charges_nothing_by_guess() -> None:
    with pytest.raises(UnknownPrice):
        reckon(OpenRequest(RESERVE), [outcome(15)], PriceBook())
