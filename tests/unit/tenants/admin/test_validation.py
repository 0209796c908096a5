"""Refused values of admin acts name their field."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tenants.admin import validation
from tenants.admin.commands import LimitSet
from tenants.errors import Invalid
from tenants.types import Meter, Tier


@pytest.mark.parametrize(
    ("field", "check", "values"),
    [
        (
            "name",
            partial(validation.name, "name"),
            ["", " ", "a b", "-a", "x" * 65, "ten_1", "é", "a/b", 7],
        ),
        ("weight", validation.weight, [0, -1, 0.009, 1_001, math.nan, math.inf, True, "1", None]),
        ("tiers", partial(validation.tiers, Tier.BATCH), [[], ["gold"], ["standard"]]),
        ("models", validation.models, [[], [""], ["x" * 257], [f"m{n}" for n in range(101)]]),
        (
            "allow_from",
            validation.networks,
            [["10.0.0.1/8"], ["office"], [""], [f"10.0.{n}.0/24" for n in range(33)]],
        ),
        (
            "labels",
            partial(validation.labels, {"team": ("ads",)}),
            [
                *({name: ["x"]} for name in ("", " team", "a,b", "a=b", "k" * 65)),
                *({"team": [value]} for value in ("", "a\0", "x" * 65)),
                {"none": []},
                {"team": [f"v{n}" for n in range(65)]},
                {f"k{n}": ["x"] for n in range(8)},
            ],
        ),
        ("scopes", validation.scopes, [[], ["root"], ["inference", "root"]]),
        (
            "s",
            lambda value: validation.seconds("s", value, 10, least=1),
            [0, 11, math.nan, math.inf, True, "1"],
        ),
        ("reason", validation.reason, ["", " ", "x" * 201, None]),
        ("model", partial(validation.model, "model"), ["", " ", "x" * 257, 7, None]),
        ("until", partial(validation.instant, "until"), ["", "soon", "2026-01-31T00:00", None]),
        (
            "thresholds",
            partial(validation.thresholds, "soft"),
            [[], [0], [-1], [1_001], [0.5], ["80"], [True], list(range(1, 10))],
        ),
        ("thresholds", partial(validation.thresholds, "hard"), [[80]]),
        ("time_zone", validation.iana_zone, ["", "Mars/Olympus", "../etc/passwd", "x" * 100, "\0"]),
        ("tier", partial(validation.choice, "tier", Tier), ["", "gold", "STANDARD"]),
        (
            "rate_per_s",
            partial(validation.rate_milli, Meter.TOTAL_TOKENS, 100),
            [0, -1, 0.0001, 0.0015, math.nan, math.inf, 1e10, True, "1"],
        ),
        ("rate_per_s", partial(validation.rate_milli, Meter.COST_NANOUSD, 100), [0.5, 1.001]),
        ("rate_per_s", partial(validation.rate_milli, Meter.REQUESTS, 10_000), [0.001]),
    ],
)
def test_bad_values_name_their_field(field: str, check: Callable[[Any], object], values: list[Any]) -> None:
    for value in values:
        with pytest.raises(Invalid) as caught:
            check(value)
        assert caught.value.field == field, value


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("meter", {"meter": "beer", "window": "day", "amount": 1}),
        ("window", {"meter": "requests", "amount": 1}),
        ("window", {"meter": "requests", "window": "week", "amount": 1}),
        ("window", {"meter": "requests", "window": "day", "rate_per_s": 1.0, "amount": 1}),
        ("amount", {"meter": "requests", "window": "day", "amount": -1}),
        ("amount", {"meter": "concurrency", "amount": -1}),
        ("amount", {"meter": "gpu_ms", "window": "lifetime", "amount": -1}),
        ("burst", {"meter": "gpu_ms", "rate_per_s": 1.0, "amount": -5}),
        ("rate_per_s", {"meter": "gpu_ms", "rate_per_s": -1.0, "amount": 5}),
        ("rate_per_s", {"meter": "gpu_ms", "rate_per_s": 0.0, "amount": 5}),
        ("amount", {"meter": "requests", "window": "day", "amount": 1.5}),
        ("amount", {"meter": "requests", "window": "day", "amount": True}),
        ("amount", {"meter": "requests", "window": "day", "amount": 10**16}),
        ("meter", {"meter": "concurrency", "amount": 1, "window": "day"}),
        ("meter", {"meter": "concurrency", "amount": 1, "rate_per_s": 1.0}),
        ("burst", {"meter": "requests", "rate_per_s": 1.0, "amount": 0}),
        ("burst", {"meter": "requests", "rate_per_s": 1.0, "amount": 10**10}),
        ("mode", {"meter": "requests", "window": "day", "amount": 1, "mode": "firm"}),
        ("tier", {"meter": "requests", "window": "day", "amount": 1, "tier": "gold"}),
        ("time_zone", {"meter": "requests", "window": "day", "amount": 1, "time_zone": "Nowhere"}),
    ],
)
def test_limits_that_make_no_sense_name_their_field(field: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(Invalid) as caught:
        validation.limit_columns(LimitSet(**{"tenant": "acme", "amount": 1, **arguments}))
    assert caught.value.field == field


def test_a_limit_of_zero_admits_nothing_and_may_be_set() -> None:
    for fields in ({"meter": "requests", "window": "day"}, {"meter": "concurrency", "window": None}):
        columns = validation.limit_columns(LimitSet(tenant="acme", amount=0, **fields))
        assert columns["amount"] == 0


def test_good_values_pass() -> None:
    assert validation.thresholds("soft", [1_000, 1, 80, 1]) == [1, 80, 1_000]
    assert validation.thresholds("hard", None) is None
    assert validation.name("name", "Team-7.a_b") == "Team-7.a_b"
    assert [validation.weight(value) for value in (0.01, 1, 1_000)] == [0.01, 1.0, 1_000.0]
    assert validation.rate_milli(Meter.TOTAL_TOKENS, 100, 0.001) == 1
    assert validation.rate_milli(Meter.COST_NANOUSD, 100, 9e9) == 9_000_000_000_000
    assert validation.iana_zone("America/Argentina/Buenos_Aires")


def test_a_label_that_is_named_is_set_or_dropped_and_the_others_stay() -> None:
    before = {"team": ("ads",), "feature": ("x", "y")}
    after = validation.labels(before, {"team": ["search", "ads", "search"], "feature": [], "env": ["prod"]})
    assert after == {"team": ("ads", "search"), "env": ("prod",)}
    assert before == {"team": ("ads",), "feature": ("x", "y")}


def test_networks_that_are_there_twice_are_one() -> None:
    networks = validation.networks(["10.0.0.0/8", "::ffff:10.0.0.0/104"])
    assert [str(each) for each in networks] == ["10.0.0.0/8"]
    assert validation.networks(None) == validation.networks([]) == ()
