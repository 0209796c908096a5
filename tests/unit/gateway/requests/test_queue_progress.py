"""Deadlines from headers, and the progress of a wait, in cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from engine.entry import QueueEntry
from gateway.domain.estimate import Times
from gateway.domain.usage import SequenceUse
from gateway.errors import ApiError
from gateway.flow.controller import Ticket
from gateway.http.request_timeout import LONGEST_S, MARGIN_S, timeout_s
from gateway.requests.queue_progress import outlook, told_in_s, wants_progress
from gateway.requests.run import Events, Run
from gateway.requests.tier_change import tier_price
from tenants.pricing.pricing import Price, uniform_book
from tenants.types import Tier
from tests.support import builders

CALL = builders.call()
ESTIMATE = builders.estimate(
    wait_s=(4.0, 8.0), ttft_s=(5.0, 9.0), tokens_ahead={"own": 300, "others": 100, "higher_tier": 0}
)


@pytest.mark.parametrize(
    ("asked", "sdk", "expected"),
    [
        (None, None, None),
        ("12.5", None, 12.5),
        (None, "600", 599.0),
        (None, "600.0", 599.0),
        # Of a short one a tenth is kept for the refusal's way back.
        (None, "2", 1.8),
        ("12.5", "600", 12.5),
        ("900", "600", 599.0),
        ("86400", None, LONGEST_S),
        (None, "1e9", LONGEST_S - MARGIN_S),
    ],
)
def test_the_least_of_the_deadlines_counts(
    asked: str | None, sdk: str | None, expected: float | None
) -> None:
    assert timeout_s(asked, sdk) == expected


def test_a_deadline_above_a_day_is_refused() -> None:
    with pytest.raises(ApiError, match=r"'86401'.*at most 86400 seconds") as refused:
        timeout_s("86401", None)
    assert (refused.value.status, refused.value.param) == (400, "X-Fairgate-Timeout-S")


@pytest.mark.parametrize("text", ["0", "-1", "soon", "", "nan", "12,5", "inf", "-inf", "1_0", "1e999"])
def test_a_deadline_that_has_passed_or_is_none_is_refused_by_the_headers_name(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        timeout_s(text, None)
    assert (refused.value.status, refused.value.param) == (400, "X-Fairgate-Timeout-S")
    with pytest.raises(ApiError) as refused:
        timeout_s(None, text)
    assert (refused.value.code, refused.value.param) == ("invalid_header", "x-stainless-read-timeout")


def test_progress_is_asked_for_with_one_and_nothing_else() -> None:
    assert wants_progress("1")
    assert wants_progress("0") is False
    assert wants_progress(None) is None
    with pytest.raises(ApiError) as refused:
        wants_progress("yes")
    assert refused.value.param == "X-Fairgate-Progress"


@pytest.mark.parametrize(
    ("progress", "expected_s", "waited_s", "told_s"),
    [
        # What the client said counts before anything else.
        (True, 0.0, 0.0, 0.0),
        (False, 60.0, 60.0, None),
        # A long wait is foreseen: p50, and not the p90.
        (None, 2.1, 0.0, 0.0),
        (None, 1.9, 0.0, 2.0),
        # None is: once it has waited so long since its arrival.
        (None, 0.0, 0.5, 1.5),
        (None, None, 0.0, 2.0),
        (None, None, 7.0, 0.0),
    ],
)
def test_a_stream_hears_of_its_wait_where_it_is_long(
    progress: bool | None, expected_s: float | None, waited_s: float, told_s: float | None
) -> None:
    estimate = None
    if expected_s is not None:
        estimate = msgspec.structs.replace(ESTIMATE, wait_s=(expected_s, 99.0))
    call = msgspec.structs.replace(CALL, progress=progress)
    assert told_in_s(call, estimate, waited_s, 2.0) == told_s


def ticket(entry_id: str, arrived_s: float, *, tenant: str = "ten_1", tier: int = 1) -> Ticket:
    return Ticket(QueueEntry(entry_id, tenant, arrived_s, 60, 20, tier), 1, 80)


async def waiting() -> Run:
    run = Run(CALL, Times(100.0), [SequenceUse(10)], uniform_book({}), Events(10, most_bytes=10**6))
    run.in_line = True
    return run


async def test_what_the_own_tenant_sent_later_is_not_ahead() -> None:
    """The forecast is for a newcomer: two of this tenant's 100-token requests stand behind ours, and ours is
    one of those that a newcomer would have before it."""
    line = [
        ticket("req_0", 99.0),
        ticket("req_1", 101.0),
        ticket("req_2", 102.0),
        ticket("req_3", 103.0, tier=0),
        ticket("req_4", 104.0, tenant="ten_2"),
    ]
    seen = outlook(await waiting(), ESTIMATE, line, 110.0)
    assert seen.tokens_ahead == {"own": 100, "others": 100, "higher_tier": 0}
    assert seen.time_left_s == (2.0, 4.0), "half of what the newcomer has before it"
    assert (seen.status, seen.tier, seen.waited_s) == ("waiting", "standard", 10.0)
    text = seen.comment()
    assert text.startswith(b": fairgate {")
    assert text.endswith(b"}\n\n")
    assert msgspec.json.decode(text.removeprefix(b": fairgate "))["time_left_s"] == {"p50": 2.0, "p90": 4.0}


@pytest.mark.parametrize(
    ("tier", "higher", "ahead", "left_s"),
    [
        # It keeps its arrival: what its tenant has there since then is behind it.
        (Tier.INTERACTIVE, 0, {"own": 200, "others": 100, "higher_tier": 0}, (3.0, 6.0)),
        # Below, it does not wait for itself.
        (Tier.BATCH, 400, {"own": 300, "others": 100, "higher_tier": 300}, (3.5, 7.0)),
    ],
)
async def test_what_it_would_have_before_it_in_another_tier(
    tier: Tier, higher: int, ahead: dict[str, int], left_s: tuple[float, float]
) -> None:
    line = [ticket("req_1", 101.0), ticket("req_3", 103.0, tier=0), ticket("req_0", 99.0, tier=0)]
    expected = msgspec.structs.replace(ESTIMATE, tokens_ahead=ESTIMATE.tokens_ahead | {"higher_tier": higher})
    seen = outlook(await waiting(), expected, line, 110.0, tier)
    assert (seen.tier, seen.tokens_ahead, seen.time_left_s) == (tier.value, ahead, left_s)


async def test_who_is_not_in_line_yet_hears_that_its_own_limits_hold_it_back() -> None:
    run = await waiting()
    run.in_line = False
    seen = outlook(run, None, [], 110.0)
    assert (seen.status, seen.tokens_ahead, seen.time_left_s) == ("limited", None, None)


async def test_a_comment_is_one_line_whatever_is_in_it() -> None:
    seen = replace(outlook(await waiting(), None, [], 110.0), tier="a\n\ndata: forged")
    assert seen.comment().count(b"\n") == 2


def test_a_tiers_price_is_the_books_with_its_multiplier() -> None:
    book = uniform_book({"m": Price(100, 50, 301)})
    price = tier_price(book, CALL, Tier.BATCH, (10, 20))
    assert (price.input_nanousd, price.cached_input_nanousd, price.output_nanousd) == (50.0, 25.0, 150.5)
    assert price.cost_nanousd == (500 + 1505, 500 + 3010, 500 + 6020)
    assert price.as_json()["service_tier"] == "flex"
