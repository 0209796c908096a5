"""Which limits may have a ceiling, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest

from tenants.admin.commands import LimitSet
from tenants.admin.validation import limit_columns
from tenants.errors import Invalid

RATE: dict[str, Any] = {
    "tenant": "acme", "meter": "output_tokens", "rate_per_s": 50.0, "amount": 500, "tier": "batch",
}  # fmt: skip


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
