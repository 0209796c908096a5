"""What a ledger row adds to which sums."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tenants.usage.sums import AMOUNTS, DAY_US, HOUR_US, MOST_WAIT_US, Charge, Grain, label_set, sums_of

AT_US = 20_000 * DAY_US + 5 * HOUR_US + 17


def charge(kind: str = "settle", detail: object = None, labels: Any = None, **changes: Any) -> Charge:
    """One request of 10 + 20 tokens."""
    made = Charge(
        *(1, kind, AT_US, "ten", "prj", "key", "small", "batch", "completed"),
        *(1, 10, 20, 3_000, 7),
        json.dumps(detail or {}),
        None if labels is None else json.dumps(labels),
    )
    return made._replace(**changes)


def amounts(one: Charge) -> dict[str, int]:
    """By name, without zeros."""
    found = dict(zip(AMOUNTS, one.amounts(), strict=True))
    return {name: amount for name, amount in found.items() if amount}


def test_a_settlement_adds_all_that_it_says() -> None:
    assert amounts(
        charge(detail={"cached_tokens": 4, "wait_s": 0.25, "ttft_s": 1.5, "finish": ["stop"]})
    ) == {
        "ended_requests": 1, "requests": 1, "input_tokens": 10, "cached_tokens": 4, "output_tokens": 20,
        "cost_nanousd": 3_000, "gpu_ms": 7, "waits": 1, "wait_us": 250_000, "first_tokens": 1,
        "ttft_us": 1_500_000,
    }  # fmt: skip


def test_a_credit_is_a_credit_and_an_adjustment_no_request_that_ended() -> None:
    nothing = {"requests": 0, "input_tokens": 0, "output_tokens": 0, "gpu_ms": 0}
    assert amounts(charge("credit", cost_nanousd=-500, **nothing)) == {"credit_nanousd": 500}
    given_back = nothing | {"requests": -1, "cost_nanousd": 0}
    assert amounts(charge("adjust", {"wait_s": 1.0}, **given_back)) == {"requests": -1}


@pytest.mark.parametrize(
    ("detail", "expected"),
    [
        ({"wait_s": None, "ttft_s": None, "cached_tokens": None}, {}),
        ({"cached_tokens": 99}, {"cached_tokens": 10}),
        ({"cached_tokens": -5, "wait_s": -1.0}, {"waits": 1}),
        ({"wait_s": 1e300}, {"waits": 1, "wait_us": MOST_WAIT_US}),
        ({"wait_s": "soon", "cached_tokens": 3}, {}),
        ([1, 2], {}),
    ],
)
def test_a_strange_detail_breaks_no_sum(detail: object, expected: dict[str, int]) -> None:
    plain = amounts(charge())
    assert amounts(charge(detail=detail)) == plain | expected


def test_every_charge_is_in_an_hour_a_day_and_a_day_of_its_key() -> None:
    sums = sums_of([charge(), charge(labels={"team": "a"})])
    found = {key.grain: key for key in sums.amounts if not key.label_set}
    assert len(sums.amounts) == 4
    assert found[Grain.HOUR.value].start_us == 20_000 * DAY_US + 5 * HOUR_US
    assert found[Grain.DAY.value][1:] == (20_000 * DAY_US, "ten", "", "", "small", "batch", "completed", "")
    assert found[Grain.KEY_DAY.value][3:5] == ("prj", "key")
    requests = AMOUNTS.index("requests")
    assert sums.amounts[found[Grain.DAY.value]][requests] == 2
    assert sums.amounts[found[Grain.KEY_DAY.value]][requests] == 1
    assert list(sums.labels.values()) == [{"team": "a"}]
    assert sums.newest_us == AT_US


def test_deleted_hours_are_not_made_again() -> None:
    hour_us = AT_US // HOUR_US * HOUR_US
    kept = sums_of([charge()], hours_from_us=hour_us)
    gone = sums_of([charge()], hours_from_us=hour_us + HOUR_US)
    assert {key.grain for key in kept.amounts} - {key.grain for key in gone.amounts} == {"hour"}


def test_what_adds_nothing_makes_no_row() -> None:
    nothing = {"requests": 0, "input_tokens": 0, "output_tokens": 0, "gpu_ms": 0, "cost_nanousd": 0}
    assert sums_of([charge("adjust", **nothing)]).amounts == {}


def test_a_set_of_labels_has_one_name_in_any_order() -> None:
    name, labels = label_set('{"team":"a","app":"x"}')
    assert label_set('{"app": "x", "team": "a"}') == (name, labels)
    assert label_set('{"app":"x","team":"b"}')[0] != name
    assert label_set("{}") == ("", {})
