"""Usage as the page adds it up: groups, a table over time that adds up, the period before, links."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from gateway.console.pages.money.amounts import MEASURES, NAMES, SummedUsage, amounts_of, change, sum_of
from gateway.console.pages.money.usage_view import (
    MOST_LINES,
    Ids,
    group_sums,
    link_of,
    over_time,
    period_before,
    summed,
)
from tenants.instants import to_us

CHARGED = MEASURES["charged"]


def row(day: int, tenant: str, model: str, cost: int) -> dict[str, Any]:
    amounts = dict.fromkeys(NAMES, 0) | {"cost_nanousd": cost, "ended_requests": 1}
    return {
        "start": f"2026-01-{day:02}T00:00:00+00:00",
        "end": f"2026-01-{day + 1:02}T00:00:00+00:00",
        "tenant_id": f"ten_{tenant}",
        "tenant": tenant,
        "model": model or None,
    } | amounts


def day_of(number: int) -> tuple[int, int]:
    start_us, end_us = (
        to_us(datetime.fromisoformat(f"2026-01-{day:02}T00:00:00+00:00")) for day in (number, number + 1)
    )
    return start_us, end_us


ROWS = [row(1, "a", "m", 5), row(1, "b", "m", 7), row(2, "a", "m", 11), row(2, "a", "", 1)]
GROUPS = ("tenant", "model")


def test_groups_are_summed_over_windows_and_the_largest_comes_first() -> None:
    before: dict[Ids, SummedUsage] = {("ten_b", "m"): SummedUsage(cost_nanousd=3)}
    found = group_sums(ROWS, GROUPS, before, CHARGED, {})
    assert [(each.names, each.now.cost_nanousd) for each in found] == [
        (("a", "m"), 16),
        (("b", "m"), 7),
        (("a", "none"), 1),
    ]
    assert [each.before.cost_nanousd for each in found if each.before] == [0, 3, 0]
    assert [each.before for each in group_sums(ROWS, GROUPS, None, CHARGED, {})] == [None] * 3
    assert sum_of(summed(ROWS, GROUPS).values()) == sum_of(map(amounts_of, ROWS))


def test_a_project_is_named_with_its_tenant() -> None:
    rows = [ROWS[0] | {"project_id": "prj_1", "project": "default"}]
    assert group_sums(rows, ("project",), None, CHARGED, {})[0].names == ("a / default",)
    assert group_sums(rows, ("tenant", "project"), None, CHARGED, {})[0].names == ("a", "default")


def test_the_columns_over_time_add_up_to_all_of_it() -> None:
    rows = [
        row(day, f"t{number:02}", "m", 100 - number) for day in (2, 1) for number in range(MOST_LINES + 3)
    ]
    days = [day_of(number) for number in (1, 2, 3)]
    table = over_time(rows, GROUPS, CHARGED, days)
    assert table.columns == [*(f"t{number:02} · m" for number in range(MOST_LINES)), "all others"]
    assert [(each.start_us, each.end_us) for each in table.rows] == days
    whole = sum(100 - number for number in range(MOST_LINES + 3))
    assert [sum(each.values) for each in table.rows] == [whole, whole, 0]  # nothing was on the third
    alone = over_time(rows, (), CHARGED, days)
    assert alone.columns == ["all"]
    assert [each.values for each in alone.rows] == [[sum(each.values)] for each in table.rows]
    assert over_time([], GROUPS, CHARGED, []).rows == []


def test_a_link_leads_to_the_requests_of_a_group_only_where_these_can_be_asked_for() -> None:
    filters = {"tenant": "", "from": "x", "label": ""}
    assert link_of(("ten_a", "m"), GROUPS, filters) == "/console/requests?tenant=ten_a&from=x&model=m"
    assert link_of(("ten_a", ""), GROUPS, filters) == ""
    assert link_of(("ten_a", "ads"), ("tenant", "label:team"), filters) == ""
    assert link_of(("ten_a", "m"), GROUPS, filters | {"label": "team=ads"}) == ""


@pytest.mark.parametrize(
    ("begin", "end", "zone", "expected"),
    [
        ("2026-01-11T00:00:00+00:00", "2026-01-21T00:00:00+00:00", "UTC", "2026-01-01T00:00:00+00:00"),
        # A day of 23 hours in it: the one before begins at midnight all the same.
        (
            "2026-03-29T00:00:00+01:00",
            "2026-03-30T00:00:00+02:00",
            "Europe/Berlin",
            "2026-03-28T00:00:00+01:00",
        ),
        (
            "2026-03-30T00:00:00+02:00",
            "2026-03-31T00:00:00+02:00",
            "Europe/Berlin",
            "2026-03-29T00:00:00+01:00",
        ),
    ],
)
def test_the_period_before_is_as_long_by_the_clock(begin: str, end: str, zone: str, expected: str) -> None:
    at = [to_us(datetime.fromisoformat(each)) for each in (begin, end)]
    assert period_before(at[0], at[1], zone) == (expected, begin)


def test_a_change_is_put_in_words() -> None:
    assert [change(*each) for each in ((5, 5), (5, 0), (15, 10), (0, 10), (1001, 1000), (999, 1000))] == [
        "as before", "new", "+50 %", "-100 %", "more by below 1 %", "less by below 1 %",
    ]  # fmt: skip


def test_measures_are_exact_for_files_and_rounded_for_people() -> None:
    assert (CHARGED.exact(1_234_567), CHARGED.shown(1_234_567)) == ("0.001234567", "$0.0012")
    device = MEASURES["device"]
    assert (device.exact(1_501), device.shown(1_501)) == ("1.501", "1.5 s")
