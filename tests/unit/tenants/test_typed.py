"""Numbers and instants as people type them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from tenants.errors import Invalid
from tenants.typed import amount_of, instant_typed, number_typed, rate_of, whole_typed

NOW = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)


def test_people_type_separators_units_and_dollars() -> None:
    assert whole_typed("amount", "1,000_000 000") == 1_000_000_000
    assert [whole_typed("amount", text) for text in ("1m", "1.5k", "2 BN")] == [
        1_000_000,
        1_500,
        2_000_000_000,
    ]
    assert amount_of("cost_nanousd", "$1,200.5") == 1_200_500_000_000
    assert rate_of("cost_nanousd", "0.001") == 1_000_000.0
    assert rate_of("total_tokens", "12.5") == 12.5


def test_per_cent_is_of_what_the_field_calls_a_hundred() -> None:
    assert number_typed("50 %", 1) == Decimal("0.5")
    assert (whole_typed("threshold", "80%", 100), whole_typed("multiplier", "40 %", 1_000)) == (80, 400)
    assert number_typed("50 %") is None


@pytest.mark.parametrize("text", ["", "many", "-1", "1.5", "²", "1e3", "9" * 19, "1,5", "1k%", "1.5g", "$5"])
def test_what_is_no_whole_number_is_named_at_its_field(text: str) -> None:
    with pytest.raises(Invalid) as refused:
        whole_typed("amount", text)
    assert refused.value.field == "amount"


@pytest.mark.parametrize("text", ["NaN", "inf", "-1", "x", "0.0000000001"])
def test_what_is_no_amount_of_money_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        amount_of("cost_nanousd", text)


def test_instants_are_days_dates_times_ago_and_iso_8601() -> None:
    day = datetime(2026, 3, 1, tzinfo=UTC)
    for text, at in {
        "today": day,
        "Yesterday": day - timedelta(days=1),
        "2026-03-01": day,
        "24h": NOW - timedelta(days=1),
        "90s ago": NOW - timedelta(seconds=90),
        "2026-03-01T01:00:00+01:00": day,
    }.items():
        assert instant_typed(text, NOW) == at


@pytest.mark.parametrize("text", ["tomorrow", "2026-01-31T18:00:00", "0h", "24", "999999999w", ""])
def test_what_is_no_instant_is_refused(text: str) -> None:
    assert instant_typed(text, NOW) is None
