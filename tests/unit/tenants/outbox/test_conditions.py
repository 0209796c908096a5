"""What alerts say of the figures they are given."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tenants.outbox import conditions, kinds, limit_conditions
from tenants.outbox.conditions import ExpiringKey, Kept
from tenants.outbox.limit_conditions import SoftEvent
from tenants.quota.pressure import Level, LimitPressure
from tenants.quota.store import LimitState
from tenants.slo.slo import ALERTS, DAY_S, WINDOWS_S, SloTally
from tenants.slo.target import Slo
from tenants.types import Limit, LimitMode, Meter, SubjectKind, Tier, Window

US = 1_000_000
HOUR_US = 3_600 * US
NOON_US = 20_000 * DAY_S * US + 12 * HOUR_US
"""A noon of UTC."""
SLO = Slo("slo_1", "", Tier.STANDARD, "ttft", 500_000, 950)
KEY = ("ten_1", "standard", "ttft")


def windows(total: int, missed: int) -> dict[int, SloTally]:
    return dict.fromkeys(WINDOWS_S, SloTally(total, missed))


def limit(mode: LimitMode = LimitMode.HARD, window: Window | None = Window.DAY, amount: int = 1_000) -> Limit:
    thresholds = (80, 100) if mode is LimitMode.SOFT else ()
    return Limit(
        "lim_1", "ten_1", SubjectKind.TENANT, "ten_1", Meter.TOTAL_TOKENS, amount, window,
        rate_per_s=None if window else 1.0, mode=mode, thresholds=thresholds,
    )  # fmt: skip


def state(of: Limit, used: int, held: int = 0, reset_s: float = 12 * 3_600.0) -> LimitState:
    return LimitState(of, used, held, max(0, of.amount - used - held), reset_s)


def pressed(of: LimitState) -> LimitPressure:
    return LimitPressure(of, Level.FREE, 0)


def test_a_burning_budget_is_an_alert_of_each_window_with_its_severity() -> None:
    found = conditions.slo_burns({KEY: windows(100, 100)}, [SLO], 10)
    assert [(each.severity, each.tenant_id) for each in found] == [
        (alert.severity, "ten_1") for alert in ALERTS
    ]
    assert len({each.key for each in found}) == len(ALERTS)
    assert found[0].summary == "standard ttft: error budget burning 20.0x too fast (last 1 h)"
    assert found[0].page == "/console/slo?tenant=ten_1&tier=standard"
    assert found[0].evidence["missed"] == 100


def test_few_misses_are_no_alert_and_neither_is_a_target_that_is_gone() -> None:
    assert conditions.slo_burns({KEY: windows(9, 9)}, [SLO], 10) == []
    assert conditions.slo_burns({KEY: windows(10, 10)}, [SLO], 10) != []
    assert conditions.slo_burns({KEY: windows(100, 100)}, [], 10) == []
    assert conditions.slo_burns({KEY: windows(10_000, 100)}, [SLO], 10) == []


def test_a_soft_limit_fires_at_its_thresholds_by_its_counter() -> None:
    soft = limit(LimitMode.SOFT)

    def levels(used: int, held: int = 0) -> list[int]:
        found = limit_conditions.soft_limits([state(soft, used, held)], [], NOON_US)
        return [each.evidence["level"] for each in found]

    assert (levels(799), levels(700, 100), levels(1_000)) == ([], [80], [80, 100])
    hard = [state(limit(), 1_000)]
    assert limit_conditions.soft_limits(hard, [], NOON_US) == []


def test_a_rate_fires_for_a_while_after_it_was_noticed() -> None:
    rate = state(limit(LimitMode.SOFT, None), 0)
    event = SoftEvent("lim_1", 80, NOON_US)
    last_us = NOON_US + limit_conditions.SOFT_SHOWN_US
    [found] = limit_conditions.soft_limits([rate], [event], last_us - 1)
    assert found.about == "lim_1:80"
    assert limit_conditions.soft_limits([rate], [event], last_us) == []


@pytest.mark.parametrize(
    ("used", "fires"),
    [(499, False), (500, True), (900, True), (1_000, True)],
    ids=["less than half", "as fast as to the end of the day", "sooner", "used up"],
)
def test_exhaustion_is_foretold_from_half_of_a_limit_on(used: int, fires: bool) -> None:
    found = limit_conditions.exhaustions([pressed(state(limit(), used))], NOON_US)
    assert bool(found) is fires
    told = {900: "will be used up in about 80 min", 1_000: "is used up"}
    if used in told:
        assert found[0].summary == f"the limit total_tokens per day of this tenant {told[used]}"


def test_an_exhausted_limit_says_since_when_and_how_many_it_refused() -> None:
    almost = state(limit(), 974)
    [found] = limit_conditions.exhaustions(
        [LimitPressure(almost, Level.EXHAUSTED, 1_300, NOON_US - HOUR_US)], NOON_US
    )
    assert found.summary.endswith("is used up since 2024-10-04 11:00 UTC, 1,300 requests refused today")
    [found] = limit_conditions.exhaustions([LimitPressure(almost, Level.NEARLY, 0)], NOON_US)
    assert found.summary.endswith("will be used up in about 19 min")


def test_exhaustion_is_not_foretold_beyond_the_window_or_a_week_or_of_short_windows() -> None:
    slow = limit(window=Window.LIFETIME)
    old = replace(slow, created_us=NOON_US - 30 * DAY_S * US)
    assert (
        limit_conditions.exhaustions([pressed(state(old, 700, reset_s=math.inf))], NOON_US) == []
    )  # in 13 days
    assert limit_conditions.exhaustions([pressed(state(old, 850, reset_s=math.inf))], NOON_US) != []  # in 5
    assert limit_conditions.exhaustions([pressed(state(limit(), 600, reset_s=3 * 3_600.0))], NOON_US) == []
    assert limit_conditions.exhaustions([pressed(state(limit(window=Window.HOUR), 1_000))], NOON_US) == []
    assert limit_conditions.exhaustions([pressed(state(limit(LimitMode.SHADOW), 1_000))], NOON_US) == []


def test_a_limit_of_the_platform_is_the_platforms_alert() -> None:
    of_all = Limit("lim_2", "platform", SubjectKind.PLATFORM, "platform", Meter.REQUESTS, 10, Window.DAY)
    [found] = limit_conditions.exhaustions([pressed(state(of_all, 10))], NOON_US)
    assert found.tenant_id == ""


def test_a_key_fires_in_its_last_week_and_not_after_its_end() -> None:
    def fires(expires_in_us: int) -> bool:
        key = ExpiringKey("key_1", "ci", "ten_1", NOON_US + expires_in_us)
        return bool(conditions.expiring_keys([key], NOON_US))

    assert [fires(each) for each in (0, 1, 7 * DAY_S * US, 7 * DAY_S * US + 1)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("requests", "within", "fires"),
    [(199, 0, False), (200, 169, True), (200, 170, False), (200, 190, False), (200, 191, True)],
)
def test_calibration_is_off_outside_of_its_bounds_with_enough_told(
    requests: int, within: int, fires: bool
) -> None:
    assert bool(conditions.calibration_off([Kept("tiny", "ttft", requests, within)])) is fires


def test_the_audit_is_late_where_new_rows_wait_for_several_intervals() -> None:
    def subjects(size: int, age_s: int, complaint: str = "") -> list[str]:
        found = conditions.audit_signing(size, 10, NOON_US - age_s * US, NOON_US, 60.0, complaint)
        return [each.kind.subject for each in found]

    assert subjects(10, 10**6) == []
    assert subjects(11, 240) == []
    assert subjects(11, 241) == ["audit.late"]
    assert subjects(10, 0, "rows are not those that were signed") == ["audit.damaged"]


@pytest.mark.parametrize(
    ("age_s", "late_s", "fires"),
    [(60, 60.0, False), (61, 60.0, True), (10**9, 0.0, False), (None, 60.0, False)],
)
def test_a_backup_is_late_after_so_long_and_never_where_that_is_0(
    age_s: int | None, late_s: float, fires: bool
) -> None:
    taken_us = None if age_s is None else NOON_US - age_s * US
    assert bool(conditions.backup_late(taken_us, NOON_US, late_s)) is fires


def test_what_is_counted_fires_from_the_first_or_from_enough_of_them() -> None:
    assert [bool(conditions.ledger_drift(each)) for each in (0, 1)] == [False, True]
    assert [bool(conditions.leaked_holds(each)) for each in (0, 1)] == [False, True]
    assert [bool(conditions.saturation(each, 5, 10)) for each in (0, 9, 10)] == [False, False, True]
    assert conditions.replicas_down([("tiny", "one", "10.0.0.1:1")])[0].kind is kinds.REPLICA_DOWN


def test_a_bounded_number_of_limits_is_looked_at() -> None:
    every = [limit(), limit(LimitMode.SOFT, None), limit(LimitMode.SHADOW), limit(window=Window.MINUTE)]
    assert limit_conditions.limits_to_look_at(every, 10) == every[:2]
    assert len(limit_conditions.limits_to_look_at(every, 1)) == 1
