"""What a key reads of when its limit will be used up."""

from __future__ import annotations

import math

from gateway.routes.views.exhaustion_view import exhaustion_of
from tenants.quota.projection import ObservedUse
from tenants.quota.store import LimitState
from tenants.types import Limit, Meter, SubjectKind, Window

NOON_US = 1_767_268_800_000_000
"""2026-01-01T12:00:00Z."""
HOUR_US = 3_600_000_000


def state(
    used: int, window: Window | None = Window.DAY, *, held: int = 0, created_us: int = 1,
    meter: Meter = Meter.REQUESTS, rate_per_s: float | None = None, reset_s: float = 12 * 3_600,
) -> LimitState:  # fmt: skip
    limit = Limit(
        "lim_1", "ten_1", SubjectKind.TENANT, "ten_1", meter, 2_000, window, rate_per_s=rate_per_s,
        created_us=created_us,
    )  # fmt: skip
    return LimitState(limit, used, held, 2_000 - used - held, reset_s)


def test_a_days_limit_goes_by_its_use_since_midnight() -> None:
    found = exhaustion_of(state(1_200, held=400), NOON_US)
    assert found["p50"] == "2026-01-01T16:00:00+00:00"
    assert "2026-01-01T16:" < found["p90"] < "2026-01-01T17:"
    assert "this window so far (12 hours): 0.02778 a second" in found["basis"]


def test_a_limit_that_was_set_in_the_window_goes_by_its_use_since_then() -> None:
    found = exhaustion_of(state(1_000, created_us=NOON_US - HOUR_US), NOON_US)
    assert found["p50"] == "2026-01-01T13:00:00+00:00"


def test_recent_use_counts_as_much_as_the_windows() -> None:
    recent = ObservedUse("this hour and the one before", 1_100, 3_600, 1_100)
    found = exhaustion_of(state(1_200), NOON_US, [recent])
    assert found["p50"] == "2026-01-01T13:20:00+00:00"
    assert "this hour and the one before" in found["basis"]


def test_a_lifetime_limit_whose_beginning_is_unknown_says_so() -> None:
    found = exhaustion_of(state(500, Window.LIFETIME, created_us=0, reset_s=math.inf), NOON_US)
    assert (found["p50"], found["p90"]) == (None, None)
    assert "nothing is known" in found["basis"]
    known = state(500, Window.LIFETIME, created_us=NOON_US - HOUR_US, reset_s=math.inf)
    begun = exhaustion_of(known, NOON_US)
    assert begun["p50"] == "2026-01-01T15:00:00+00:00"


def test_rates_and_concurrency_are_never_used_up() -> None:
    rate = exhaustion_of(state(1_999, None, rate_per_s=1.0), NOON_US)
    assert rate == {"p50": None, "p90": None, "basis": "a rate refills by itself"}
    running = exhaustion_of(state(0, None, meter=Meter.CONCURRENCY), NOON_US)
    assert running["basis"] == "requests that end give it back"


def test_tokens_without_a_number_of_requests_have_no_p90() -> None:
    found = exhaustion_of(state(1_200, meter=Meter.TOTAL_TOKENS), NOON_US)
    assert found["p50"] == "2026-01-01T20:00:00+00:00"
    assert found["p90"] is None
