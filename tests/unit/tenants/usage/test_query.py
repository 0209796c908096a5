"""Questions about usage: their windows, the sums that answer them, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest

from tenants.errors import Invalid
from tenants.usage.query import MOST_DAYS, UsageQuery, check, edges, grain_for
from tenants.usage.sums import DAY_US, HOUR_US, Grain


def us(text: str) -> int:
    """Microseconds since 1970."""
    return round(datetime.fromisoformat(text).timestamp()) * 1_000_000


JANUARY = UsageQuery(us("2026-01-01T00:00+00:00"), us("2026-02-01T00:00+00:00"))


def asked(**changes: Any) -> UsageQuery:
    """The first month of 2026, changed."""
    return replace(JANUARY, **changes)


def grain(query: UsageQuery, hours_from_us: int = 0) -> Grain | None:
    """What answers it."""
    check(query)
    return grain_for(query, edges(query), hours_from_us)


def test_windows_begin_where_days_and_months_do() -> None:
    days = edges(asked(window="day"))
    assert len(days) == 32
    assert {right - left for left, right in pairwise(days)} == {DAY_US}
    assert edges(JANUARY) == [JANUARY.from_us, JANUARY.to_us]
    quarter = asked(from_us=us("2026-01-15T00:00+00:00"), to_us=us("2026-03-10T00:00+00:00"), window="month")
    # The first and the last are cut.
    assert [datetime.fromtimestamp(each / 1e6, UTC).date().isoformat() for each in edges(quarter)] == [
        "2026-01-15", "2026-02-01", "2026-03-01", "2026-03-10",
    ]  # fmt: skip
    hours = edges(asked(from_us=JANUARY.from_us, to_us=JANUARY.from_us + 3 * HOUR_US, window="hour"))
    assert len(hours) == 4


def test_days_of_a_time_zone_are_as_long_as_they_are() -> None:
    spring = UsageQuery(
        us("2026-03-28T00:00+01:00"), us("2026-03-31T00:00+02:00"), "day", time_zone="Europe/Berlin"
    )
    at = edges(spring)
    assert [(right - left) // HOUR_US for left, right in pairwise(at)] == [24, 23, 24]
    assert grain(spring) is Grain.HOUR


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Grain.DAY),
        ({"window": "day", "group_by": ("tenant", "model", "tier", "outcome")}, Grain.DAY),
        ({"window": "hour"}, Grain.HOUR),
        ({"from_us": JANUARY.from_us + HOUR_US}, Grain.HOUR),
        ({"group_by": ("key",)}, Grain.KEY_DAY),
        ({"project_id": "prj_a", "window": "month"}, Grain.KEY_DAY),
        ({"labels": (("team", "a"),)}, Grain.KEY_DAY),
        ({"group_by": ("label:team",)}, Grain.KEY_DAY),
        # Of one tenant, from the ledger.
        ({"group_by": ("key",), "window": "hour", "tenant_id": "ten_a"}, None),
        ({"time_zone": "Asia/Kolkata", "window": "day", "tenant_id": "ten_a"}, None),
        ({"from_us": JANUARY.from_us + 1, "tenant_id": "ten_a"}, None),
    ],
)
def test_the_coarsest_sums_that_no_window_cuts_answer(
    changes: dict[str, Any], expected: Grain | None
) -> None:
    assert grain(asked(**changes)) is expected


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"window": "year"}, "window", "not one of total, hour, day, month"),
        ({"to_us": JANUARY.from_us}, "from", "before `to`"),
        ({"to_us": JANUARY.from_us + 3653 * DAY_US}, "from", "the most is 1100"),
        ({"to_us": JANUARY.from_us + 3653 * DAY_US, "window": "month"}, "from", "3653 days"),
        ({"to_us": JANUARY.from_us + 32 * DAY_US, "window": "hour"}, "from", "the most is 31"),
        ({"group_by": ("user",)}, "group_by", "'user' is not one of tenant"),
        ({"group_by": ("key", "key")}, "group_by", "once"),
        ({"group_by": ("label:",)}, "group_by", "1 to 64"),
        ({"labels": (("team", "a\0"),)}, "label", "printable"),
        ({"labels": tuple((f"l{n}", "a") for n in range(5))}, "label", "the most is 4"),
        ({"from_us": JANUARY.from_us + 1}, "from", "full hour"),
        ({"to_us": JANUARY.to_us - 1}, "to", "full hour"),
        ({"time_zone": "Asia/Kolkata", "window": "day"}, "time_zone", "whole hours off"),
        ({"time_zone": "Europe/Berlin", "window": "day", "group_by": ("key",)}, "time_zone", "UTC days"),
        ({"window": "hour", "group_by": ("key",)}, "window", "name one tenant"),
        (
            {"window": "day", "group_by": ("key",), "time_zone": "Asia/Tokyo", "tenant_id": "t"}
            | {"to_us": JANUARY.from_us + 40 * DAY_US},
            "time_zone",
            "at most 31 days",
        ),
    ],
)
def test_what_cannot_be_answered_says_why_and_what_can(
    changes: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(Invalid, match=says) as refused:
        grain(asked(**changes))
    assert refused.value.field == field


def test_hours_that_are_gone_are_said_to_be() -> None:
    gone_us = JANUARY.from_us + DAY_US
    with pytest.raises(Invalid, match="not kept any more"):
        grain(asked(window="hour"), gone_us)
    assert grain(asked(window="day"), gone_us) is Grain.DAY
    assert grain(asked(window="hour", from_us=gone_us), gone_us) is Grain.HOUR
    assert grain(asked(window="hour", tenant_id="ten_a"), gone_us) is None


def test_a_question_has_a_bounded_number_of_windows() -> None:
    for window, days in MOST_DAYS.items():
        query = asked(window=window, to_us=JANUARY.from_us + days * DAY_US)
        check(query)
        assert len(edges(query)) <= 31 * 24 + 1
