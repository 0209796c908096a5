"""Targets apply to the right tenants; budgets burn as in the SRE workbook."""

from __future__ import annotations

import pytest

from tenants.slo.slo import ALERTS, SPAN_S, SloBook, SloTally, burning
from tenants.slo.target import Slo
from tenants.types import Tier

NOW_S = 1_700_000_130.0
START_S = int(NOW_S) // SPAN_S * SPAN_S


def _slo(tenant_id: str, metric: str, target_us: int, tier: Tier = Tier.STANDARD) -> Slo:
    return Slo(f"slo_{tenant_id}{metric}", tenant_id, tier, metric, target_us, 950)


def test_a_tenants_own_target_counts_instead_of_its_tiers() -> None:
    book = SloBook([_slo("", "ttft", 500_000), _slo("", "e2e", 9_000_000), _slo("ten_a", "ttft", 200_000)])

    assert [(each.metric, each.target_us) for each in book.of("ten_a", Tier.STANDARD)] == [
        ("e2e", 9_000_000),
        ("ttft", 200_000),
    ]
    assert [each.target_us for each in book.of("ten_b", Tier.STANDARD)] == [9_000_000, 500_000]
    assert book.of("ten_a", Tier.BATCH) == ()
    assert not SloBook()


@pytest.mark.parametrize(
    ("tally", "per_mille", "rate"),
    [
        (SloTally(1000, 50), 950, 1.0),
        (SloTally(1000, 10), 999, 10.0),
        (SloTally(1000, 0), 999, 0.0),
        (SloTally(0, 0), 950, None),
        (SloTally(10, 1), 1000, float("inf")),
        (SloTally(10, 0), 1000, 0.0),
    ],
)
def test_the_budget_burns_by_misses_per_allowed_miss(
    tally: SloTally, per_mille: int, rate: float | None
) -> None:
    assert tally.burn_rate(per_mille) == (None if rate is None else pytest.approx(rate))


def test_an_alert_needs_the_long_and_the_short_window() -> None:
    """An hour ago everything was missed; since then nothing: it was significant, and it is over."""
    over = {START_S - 3300: SloTally(100, 100), START_S: SloTally(100, 0)}
    still = {START_S - 3300: SloTally(100, 100), START_S: SloTally(100, 80)}

    hour_over, hour_still = burning(over, 950, NOW_S)[0], burning(still, 950, NOW_S)[0]
    assert hour_over.long_rate == pytest.approx(10.0)
    assert not hour_over.fires
    assert hour_still.long_rate == pytest.approx(18.0)
    assert hour_still.short_rate == pytest.approx(16.0)
    assert hour_still.fires


@pytest.mark.parametrize(("missed", "fires"), [(1, False), (9, False), (10, True)])
def test_a_few_misses_of_a_few_requests_are_no_incident(missed: int, fires: bool) -> None:
    found = burning({START_S: SloTally(missed, missed)}, 950, NOW_S)
    assert [each.fires for each in found] == [fires] * len(ALERTS)
    assert [each.long_rate for each in found] == pytest.approx([20.0] * len(ALERTS)), "the rate is shown"
    assert all(each.fires for each in burning({START_S: SloTally(missed, missed)}, 950, NOW_S, 1))


def test_windows_end_where_they_should() -> None:
    spans = {START_S - 3600: SloTally(1, 1), START_S - 3300: SloTally(1, 0)}

    assert burning(spans, 950, NOW_S)[0].long_rate == 0.0, "what lies an hour and more back is not in it"
    assert burning(spans, 950, NOW_S)[1].long_rate == pytest.approx(10.0)


def test_the_alerts_are_the_workbooks() -> None:
    """2 % of a thirty days' budget in an hour, 5 % in six, 10 % in three days."""
    shares = [alert.rate * alert.long_s / (30 * 86_400) for alert in ALERTS]

    assert shares == pytest.approx([0.02, 0.05, 0.10])
    assert [alert.long_s // alert.short_s for alert in ALERTS] == [12, 12, 12]
