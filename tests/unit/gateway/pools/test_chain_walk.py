"""The way along a chain: which pool is passed over, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from gateway import errors
from gateway.budget.holds import BudgetDenied
from gateway.dispatch.admission import (
    COST_HEADER,
    WAIT_HEADER,
    DeadlineUnreachable,
    EstimateExceeds,
    TargetUnreachable,
)
from gateway.dispatch.dispatcher import NoEngineAvailable, QueueExpired, QueueRefused
from gateway.domain.fallback import FallbackReason, NoneTook
from gateway.error_mapping import as_api_error
from gateway.flow.deadline_check import TooLate
from gateway.flow.types import QueueFull
from gateway.pools.chain_walk import ChainWalk
from tenants.errors import DatabaseUnavailable
from tenants.nouns.alias import Chain
from tenants.pricing.pricing import Price, uniform_book
from tenants.quota.store import Denied
from tenants.types import Limit, Meter, SubjectKind, Tier, Window

LIMIT = Limit("lim_1", "ten_1", SubjectKind.TENANT, "ten_1", Meter.COST_NANOUSD, 10, Window.LIFETIME)
SPENT = BudgetDenied(Denied(LIMIT, 20, 0, None, ()))
LATE = TooLate("wait", 1.0, 2.0, 1.0)
TOO_LONG = errors.context_too_long(10, 12, None, "messages")
PRICES = {"a": 100, "b": 100, "c": 150, "dear": 200}


@dataclass
class Walked:
    """A walk whose pools refuse what the test says."""

    pools: Sequence[str]
    max_price: float = 1.0
    refuse: Mapping[str, Exception] = field(default_factory=dict)
    down: frozenset[str] = frozenset()
    only: str | None = None
    passed: list[tuple[str, FallbackReason]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.walk = ChainWalk(
            "big",
            Chain(tuple(self.pools), self.max_price),
            [Tier.STANDARD],
            uniform_book({model: Price(price, price, price) for model, price in PRICES.items()}),
            parse=self._parse,
            has_engine=lambda pool: pool not in self.down,
            on_passed=lambda pool, reason: self.passed.append((pool, reason)),
            only=self.only,
        )

    async def _parse(self, pool: str) -> str:
        if pool in self.refuse:
            raise self.refuse[pool]
        return f"for {pool}"


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (SPENT, FallbackReason.BUDGET),
        (DeadlineUnreachable(LATE), FallbackReason.DEADLINE),
        (TargetUnreachable(LATE), FallbackReason.DEADLINE),
        (QueueRefused(QueueFull(False, 3, 1.0)), FallbackReason.DEADLINE),
        (EstimateExceeds(WAIT_HEADER, "1 s", "it may wait 2 s"), FallbackReason.DEADLINE),
        (EstimateExceeds(COST_HEADER, "1 USD", "it may cost 2 USD"), FallbackReason.BUDGET),
        (NoEngineAvailable(), FallbackReason.HEALTH),
    ],
)
async def test_what_one_pool_cannot_take_the_next_one_gets(
    refusal: Exception, reason: FallbackReason
) -> None:
    walked = Walked(["a", "b"])
    assert await walked.walk.first() == "for a"
    assert await walked.walk.onward(refusal) == "for b"
    fallback = walked.walk.fallback
    assert (fallback.asked, fallback.taken, fallback.price_ratio) == ("big", "b", 1.0)
    assert [(each.model, each.reason) for each in fallback.tried] == walked.passed == [("a", reason)]


async def test_a_model_that_it_does_not_fit_or_that_never_served_is_passed_when_it_is_parsed() -> None:
    walked = Walked(["a", "b", "c"], 1.5, refuse={"a": TOO_LONG, "b": NoEngineAvailable()})
    assert await walked.walk.first() == "for c"
    assert walked.passed == [("a", FallbackReason.CONTEXT), ("b", FallbackReason.HEALTH)]
    assert walked.walk.fallback.price_ratio == 1.5


async def test_a_model_for_which_a_limit_is_spent_is_passed_when_it_is_parsed() -> None:
    walked = Walked(["a", "b", "c"], 1.5, refuse={"a": SPENT, "b": SPENT})
    assert await walked.walk.first() == "for c"
    assert walked.passed == [("a", FallbackReason.BUDGET), ("b", FallbackReason.BUDGET)]


async def test_a_dearer_model_is_passed_over_unless_the_chain_allows_it() -> None:
    strict = Walked(["a", "c", "unpriced", "b"])
    await strict.walk.first()
    assert await strict.walk.onward(SPENT) == "for b"
    assert strict.passed[1:] == [("c", FallbackReason.PRICE), ("unpriced", FallbackReason.PRICE)]
    lenient = Walked(["a", "dear", "c"], 1.5)
    await lenient.walk.first()
    assert await lenient.walk.onward(SPENT) == "for c"
    assert lenient.passed[1:] == [("dear", FallbackReason.PRICE)]


async def test_prices_are_compared_with_the_first_also_where_that_one_is_away() -> None:
    walked = Walked(["a", "dear", "b"], refuse={"a": NoEngineAvailable()})
    assert await walked.walk.first() == "for b"


async def test_where_none_is_left_the_error_is_that_of_the_first_and_says_what_was_tried() -> None:
    walked = Walked(["a", "b", "dear"], down=frozenset({"b"}))
    await walked.walk.first()
    with pytest.raises(NoneTook) as caught:
        await walked.walk.onward(SPENT)
    error = as_api_error(caught.value, "req_1")
    assert (error.status, error.code) == (429, "insufficient_quota")
    shown = error.payload()["fairgate"]["fallback"]
    assert (shown["asked"], shown["taken"]) == ("big", None)
    assert [(each["model"], each["reason"]) for each in shown["tried"]] == [
        ("a", "budget"), ("b", "health"), ("dear", "price")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "refusal", [DatabaseUnavailable("away"), QueueExpired(), errors.bad_request("Invalid 'n'.", "n")]
)
async def test_what_no_other_pool_would_take_back_ends_the_walk(refusal: Exception) -> None:
    walked = Walked(["a", "b"], refuse={"a": refusal})
    with pytest.raises(type(refusal)):
        await walked.walk.first()
    if not isinstance(refusal, errors.ApiError):
        walked = Walked(["a", "b"])
        await walked.walk.first()
        with pytest.raises(type(refusal)):
            await walked.walk.onward(refusal)
    assert walked.passed == []


async def test_what_only_a_later_model_cannot_take_is_its_own_affair() -> None:
    bad = errors.bad_request("Invalid 'prompt': token id 9 is not in 0..4.", "prompt")
    walked = Walked(["a", "b", "c"], 2.0, refuse={"b": bad})
    await walked.walk.first()
    assert await walked.walk.onward(SPENT) == "for c"
    assert walked.passed[1:] == [("b", FallbackReason.REQUEST)]


async def test_a_quote_names_the_one_pool_that_may_take_it() -> None:
    walked = Walked(["a", "b"], only="b")
    assert await walked.walk.first() == "for b"
    with pytest.raises(NoneTook):
        await walked.walk.onward(NoEngineAvailable())
    other = Walked(["a", "b"], only="elsewhere")
    assert await other.walk.first() == "for a"
