"""Amounts in words and as typed."""

from __future__ import annotations

import pytest

from gateway.console.pages.tenant_parts.amounts import (
    amount_text,
    amount_typed,
    narrowed,
    subject_text,
    what_of,
)
from tenants.typed import amount_of
from tenants.types import Meter, SubjectKind, Tier, Window
from tests.support.quota import limit, on_platform


def test_amounts_are_exact_in_the_unit_of_their_meter() -> None:
    assert amount_text(Meter.TOTAL_TOKENS, 1_234_567) == "1,234,567"
    assert amount_text(Meter.COST_NANOUSD, 12_500_000_001) == "$12.500000001"
    assert amount_text(Meter.GPU_MS, 90_000) == "90.0 s"


@pytest.mark.parametrize("amount", [0, 1, 999_999_999, 1_000_000_000, 123_456_789_012_345])
def test_what_a_field_shows_is_read_back_as_the_same_amount(amount: int) -> None:
    for meter in Meter:
        assert amount_of(meter, amount_typed(meter, amount)) == amount


def test_a_limit_is_put_in_words() -> None:
    day = limit(
        Meter.INPUT_TOKENS, 5, window=Window.DAY, time_zone="Europe/Berlin", tier=Tier.BATCH, model="m"
    )
    assert what_of(day) == "input tokens a day (Europe/Berlin)"
    assert narrowed(day) == "tier batch, model m"
    assert narrowed(limit(above_tokens=4_000)) == "requests above 4,000 tokens"
    assert what_of(limit()) == "tokens ever"
    assert what_of(limit(Meter.REQUESTS, 5, rate_per_s=2.0)) == "requests, refilled by 2 a second"
    assert what_of(limit(Meter.CONCURRENCY, 5)) == "requests at a time"


def test_subjects_are_named() -> None:
    assert subject_text(limit(), "acme") == "tenant acme"
    assert subject_text(limit(kind=SubjectKind.KEY, subject_id="key_1"), None) == "key key_1"
    assert subject_text(limit(kind=SubjectKind.END_USER), None) == "each end user"
    assert subject_text(on_platform(), None) == "all tenants together"
