"""Which hours of usage a limit's projection goes by."""

from __future__ import annotations

from gateway.console.pages.tenant_parts.limit_rows import UseHistory, projection_of, projections
from tenants.quota.projection import HOUR_S, HOUR_US, WEEK_HOURS
from tenants.types import Meter, SubjectKind, Tier, Window
from tenants.usage.read import UsageRow
from tenants.usage.sums import AMOUNTS
from tests.support.quota import limit

NOW_US = 500_000 * HOUR_US
HOURS = 4 * WEEK_HOURS


def row(back: int, model: str, tier: str, **amounts: int) -> UsageRow:
    start_us = NOW_US - back * HOUR_US
    values = tuple(amounts.get(name, 0) for name in AMOUNTS)
    return UsageRow((start_us, model, tier), start_us + HOUR_US, values)


HISTORY = UseHistory(
    tuple(
        each
        for back in range(1, HOURS + 1)
        for each in (
            row(back, "m", "standard", input_tokens=6, output_tokens=4, requests=1, cost_nanousd=100),
            row(back, "n", "batch", input_tokens=30, output_tokens=0, requests=2, cost_nanousd=50),
        )
    ),
    4,
)
LEFT: dict[str, float | None] = {"used": 0, "held": 0, "remaining": 80, "reset_s": None}


def test_a_limit_goes_by_what_its_meter_counts_of_the_requests_that_it_binds() -> None:
    for shaped, hours in (
        (limit(Meter.TOTAL_TOKENS, 80), 2),
        (limit(Meter.TOTAL_TOKENS, 80, model="m"), 8),
        (limit(Meter.TOTAL_TOKENS, 80, tier=Tier.BATCH), 80 / 30),
        (limit(Meter.OUTPUT_TOKENS, 80), 20),
        (limit(Meter.REQUESTS, 80), 80 / 3),
        (limit(Meter.COST_NANOUSD, 80), 80 / 150),
    ):
        found = projection_of(shaped, LEFT, HISTORY, NOW_US)
        assert found.p50_s is not None
        assert round(found.p50_s) == round(hours * HOUR_S), shaped
        assert found.p90_s == found.p50_s


def test_what_is_not_kept_by_the_hour_goes_by_its_window_and_says_so() -> None:
    of_key = limit(Meter.REQUESTS, 100, window=Window.DAY, kind=SubjectKind.KEY, subject_id="key_1")
    usage = LEFT | {"used": 60, "remaining": 40, "reset_s": 57_600.0}
    found = projection_of(of_key, usage, HISTORY, NOW_US)
    into_day_s = NOW_US // 1_000_000 % 86_400
    assert found.p50_s is not None
    assert round(found.p50_s) == round(40 / (60 / into_day_s))
    assert found.p90_s is None
    assert found.basis.startswith("usage by the hour is kept for whole tenants")
    young = projection_of(limit(Meter.REQUESTS, 100, window=Window.DAY), usage, UseHistory((), 1), NOW_US)
    assert young.basis.startswith("too little history: 1 of 2 whole weeks")
    assert young.p50_s == found.p50_s


def test_what_refills_by_itself_is_never_used_up() -> None:
    for shaped in (limit(rate_per_s=1.0), limit(Meter.CONCURRENCY, 4)):
        assert projection_of(shaped, LEFT, HISTORY, NOW_US).p50_s is None


def test_a_lifetime_limit_whose_beginning_is_unknown_guesses_nothing() -> None:
    found = projection_of(limit(), LEFT | {"used": 20}, UseHistory((), 0), NOW_US)
    assert found.p50_s is None


def test_counters_that_are_away_or_of_end_users_have_none() -> None:
    assert projections([limit()], {}, HISTORY, NOW_US) == {}
    assert projections([limit()], {"lim_test": {"end_users": 3}}, HISTORY, NOW_US) == {}
