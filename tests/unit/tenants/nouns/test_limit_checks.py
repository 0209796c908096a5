"""Which limits can be set, and what is said of the others."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tenants.errors import Invalid
from tenants.nouns.limit import LimitSet
from tenants.nouns.limit_checks import limit_columns

RATE: dict[str, Any] = {
    "tenant": "acme", "meter": "output_tokens", "rate_per_s": 50.0, "amount": 500, "tier": "batch",
}  # fmt: skip
DAY = {"meter": "requests", "window": "day", "amount": 1}
OF_TOKENS = {"meter": "total_tokens", "amount": 100}
OF_MONEY = {"meter": "cost_nanousd", "amount": 100}
WRONG_THRESHOLDS: list[Any] = [[], [0], [-1], [1_001], [0.5], ["80"], [True], list(range(1, 10))]
WRONG_RATES: list[Any] = [0, -1, 0.0001, 0.0015, math.nan, math.inf, 1e10, True, "1"]


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("meter", {"meter": "beer", "window": "day", "amount": 1}),
        ("window", {"meter": "requests", "amount": 1}),
        ("window", {"meter": "requests", "window": "week", "amount": 1}),
        ("window", {"meter": "requests", "window": "day", "rate_per_s": 1.0, "amount": 1}),
        ("amount", {"meter": "requests", "window": "day", "amount": -1}),
        ("amount", {"meter": "concurrency", "amount": -1}),
        ("amount", {"meter": "gpu_ms", "window": "lifetime", "amount": -1}),
        ("burst", {"meter": "gpu_ms", "rate_per_s": 1.0, "amount": -5}),
        ("rate_per_s", {"meter": "gpu_ms", "rate_per_s": -1.0, "amount": 5}),
        ("rate_per_s", {"meter": "gpu_ms", "rate_per_s": 0.0, "amount": 5}),
        ("amount", {"meter": "requests", "window": "day", "amount": 1.5}),
        ("amount", {"meter": "requests", "window": "day", "amount": True}),
        ("amount", {"meter": "requests", "window": "day", "amount": 10**16}),
        ("meter", {"meter": "concurrency", "amount": 1, "window": "day"}),
        ("meter", {"meter": "concurrency", "amount": 1, "rate_per_s": 1.0}),
        ("burst", {"meter": "requests", "rate_per_s": 1.0, "amount": 0}),
        ("burst", {"meter": "requests", "rate_per_s": 1.0, "amount": 10**10}),
        ("mode", {"meter": "requests", "window": "day", "amount": 1, "mode": "firm"}),
        *(("thresholds", DAY | {"mode": "soft", "thresholds": wrong}) for wrong in WRONG_THRESHOLDS),
        ("thresholds", DAY | {"thresholds": [80]}),
        *(("rate_per_s", OF_TOKENS | {"rate_per_s": wrong}) for wrong in WRONG_RATES),
        *(("rate_per_s", OF_MONEY | {"rate_per_s": wrong}) for wrong in (0.5, 1.001)),
        ("rate_per_s", {"meter": "requests", "amount": 10_000, "rate_per_s": 0.001}),
        ("tier", {"meter": "requests", "window": "day", "amount": 1, "tier": "gold"}),
        ("time_zone", {"meter": "requests", "window": "day", "amount": 1, "time_zone": "Nowhere"}),
    ],
)
def test_limits_that_make_no_sense_name_their_field(field: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(Invalid) as caught:
        limit_columns(LimitSet(**{"tenant": "acme", "amount": 1, **arguments}))
    assert caught.value.field == field


def test_a_limit_of_zero_admits_nothing_and_may_be_set() -> None:
    for fields in ({"meter": "requests", "window": "day"}, {"meter": "concurrency", "window": None}):
        columns = limit_columns(LimitSet(tenant="acme", amount=0, **fields))
        assert columns["amount"] == 0


def test_rates_are_stored_in_thousandths_and_thresholds_rising() -> None:
    def columns(**fields: Any) -> dict[str, Any]:
        return limit_columns(LimitSet(tenant="acme", **fields))

    assert columns(**OF_TOKENS, rate_per_s=0.001)["rate_milli"] == 1
    assert columns(**OF_MONEY, rate_per_s=9e9)["rate_milli"] == 9_000_000_000_000
    assert columns(**DAY, mode="soft", thresholds=[1_000, 1, 80, 1])["thresholds"] == [1, 80, 1_000]
    assert columns(**DAY)["thresholds"] is None


def refused(**changed: Any) -> str:
    with pytest.raises(Invalid) as caught:
        limit_columns(LimitSet(**RATE | {"ceiling_per_s": 400.0} | changed))
    assert caught.value.field == "ceiling_per_s"
    return str(caught.value)


@pytest.mark.parametrize("meter", ["output_tokens", "input_tokens", "total_tokens"])
@pytest.mark.parametrize(("ceiling", "stored"), [(50.0, 50_000), (400.125, 400_125), (None, None)])
def test_a_hard_rate_of_tokens_in_tier_batch_has_one(
    meter: str, ceiling: float | None, stored: int | None
) -> None:
    columns = limit_columns(LimitSet(**RATE | {"ceiling_per_s": ceiling, "meter": meter}))
    assert columns["ceiling_milli"] == stored


def test_a_ceiling_below_the_rate_would_break_a_promise() -> None:
    said = refused(ceiling_per_s=49.999)
    assert "49.999 is below rate_per_s, 50, which is promised: give at least that, or leave it out" in said


def test_a_ceiling_that_cannot_be_counted_is_refused() -> None:
    assert "between rate_per_s and 9,000,000" in refused(ceiling_per_s=9_000_001.0)
    assert "steps of 0.001" in refused(ceiling_per_s=60.0001)
    for value in (float("nan"), float("inf")):
        assert refused(ceiling_per_s=value)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"rate_per_s": None, "window": "day"}, "only a rate has a ceiling"),
        ({"rate_per_s": None, "meter": "concurrency"}, "only a rate has a ceiling"),
        ({"meter": "cost_nanousd"}, "only rates of tokens"),
        ({"meter": "requests"}, "only rates of tokens"),
        ({"meter": "gpu_ms"}, "only rates of tokens"),
        ({"mode": "soft"}, "a soft limit refuses nothing"),
        ({"mode": "shadow"}, "a shadow limit refuses nothing"),
        ({"tier": None}, "add tier batch"),
        ({"tier": "interactive"}, "add tier batch"),
        ({"each_end_user": True}, "would add up without a bound"),
    ],
)
def test_what_may_not_move_says_why_and_the_way_out(changed: dict[str, Any], why: str) -> None:
    said = refused(**changed)
    assert why in said
    assert "leave it out" in said or "set it on the tenant" in said
