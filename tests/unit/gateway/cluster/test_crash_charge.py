"""Charges for requests whose gateway died, and the source named in the row."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from engine.messages import SequenceOutcome
from gateway.cluster.crash_charge import reckon
from tenants.errors import UnknownPrice
from tenants.ledger.progress import Progress, RunningUse
from tenants.ledger.rows import LedgerRow, OpenRequest
from tenants.outcomes import RequestOutcome
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


def test_a_sequence_that_moved_is_charged_once_by_the_engine_that_had_most_of_it() -> None:
    moved = [outcome(12, gpu_us=900), replace(outcome(33, gpu_us=1_500), finish="stop")]
    for outcomes in (moved, moved[::-1]):
        found = reckon(OpenRequest(RESERVE), outcomes, BOOK)
        assert found.charged == found.counted == Amounts(10, 33, 10 * 100 + 33 * 300, 1, 2)
        assert (found.detail["engine_counted"], found.detail["finish"]) == (2, ["stop"])


LIVE, GONE = "engine-0/live", "engine-0/gone"
WITNESSED = Progress(frozenset({LIVE}), frozenset({"m"}))
"""A record of a gateway whose only engine lives on."""


def sent(engine: str, output_tokens: int) -> Progress:
    return replace(WITNESSED, requests={"r": RunningUse(engine, 10, 0, output_tokens, 5_000)})


def test_without_an_engine_the_last_report_is_billed_and_limits_count_what_was_held() -> None:
    request = OpenRequest(
        RESERVE, (top_up(1, 20, [10, 30, 10_000, 1, 0]), top_up(2, 20, [10, 55, 17_500, 1, 7]))
    )
    found = reckon(request, [], BOOK, Progress())
    assert found.outcome is RequestOutcome.LOST
    assert found.charged == Amounts(10, 55, 17_500, 1, 7)
    assert found.counted == replace(request.held, gpu_ms=7) == Amounts(10, 80, 25_000, 1, 7)
    assert found.detail["basis"] == "last_report"
    assert found.detail["uncertain_tokens"] == 80 - 55
    assert found.detail["in_doubt"] == [0, 25, 7_500, 0, 0]


def test_the_last_report_bills_tokens_as_they_were_and_counts_them_as_limits_do() -> None:
    reported = {"used": [5, 138, 17_500, 1, 7], "tokens": [10, 55, 17_500, 1, 7]}
    request = OpenRequest(RESERVE, (replace(top_up(1, 110, []), detail=reported),))
    found = reckon(request, [], BOOK, Progress())
    assert found.charged == Amounts(10, 55, 17_500, 1, 7)
    assert found.detail["in_doubt"] == [5, 12, 28_500, 0, 0]


def test_a_whole_hold_that_was_never_topped_up_counts_whole_and_bills_what_the_record_says() -> None:
    nothing = reckon(OpenRequest(RESERVE), [], BOOK, Progress())
    assert nothing.charged == Amounts(requests=1)
    assert nothing.counted == RESERVE.amounts
    assert nothing.detail["in_doubt"] == [10, 40, 13_000, 1, 0]
    recorded = reckon(OpenRequest(RESERVE), [], BOOK, sent(GONE, 33), {LIVE})
    assert recorded.charged == Amounts(10, 33, 10 * 100 + 33 * 300, 1, 5)
    assert recorded.counted == Amounts(10, 40, 13_000, 1, 5)
    assert recorded.detail["in_doubt"] == [0, 7, 2_100, 0, 0]
    # Of record and top-up the one that says more.
    later = OpenRequest(RESERVE, (top_up(1, 20, [10, 35, 11_500, 1, 0]),))
    assert reckon(later, [], BOOK, sent(GONE, 33), {LIVE}).charged.output_tokens == 35


@pytest.mark.parametrize(
    ("progress", "lives", "known"),
    [
        (None, set(), True),
        (WITNESSED, {LIVE}, True),
        (WITNESSED, {LIVE, "another/1"}, True),
        (WITNESSED, {"engine-0/next"}, False),
        (WITNESSED, set(), False),
        (Progress(frozenset({LIVE}), frozenset({"other"})), {LIVE}, False),
        (Progress(), {LIVE}, False),
        (sent(LIVE, 0), {LIVE}, True),
        (sent(GONE, 0), {LIVE}, False),
        (sent("a server of others", 3), {LIVE}, False),
        (WITNESSED.after(Progress()), {LIVE}, False),
        (WITNESSED.after(sent(GONE, 0)), {LIVE}, False),
    ],
)
def test_nothing_is_in_doubt_where_the_engines_that_it_can_have_got_to_lived_on(
    progress: Progress | None, lives: set[str], known: bool
) -> None:
    found = reckon(OpenRequest(RESERVE), [], BOOK, progress, lives)
    assert ("in_doubt" not in found.detail) is known
    counted = found.counted
    assert (counted.input_tokens, counted.output_tokens) == ((0, 0) if known else (10, 40))
    assert (found.detail["uncertain_tokens"] == 0) is known


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
