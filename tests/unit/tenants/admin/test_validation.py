"""Refused values of admin acts name their field."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tenants.errors import Invalid
from tenants.nouns import checks, key
from tenants.nouns.tenant import checked_labels, checked_tiers, checked_weight
from tenants.types import Tier


@pytest.mark.parametrize(
    ("field", "check", "values"),
    [
        (
            "name",
            partial(checks.name, "name"),
            ["", " ", "a b", "-a", "x" * 65, "ten_1", "é", "a/b", 7],
        ),
        ("weight", checked_weight, [0, -1, 0.009, 1_001, math.nan, math.inf, True, "1", None]),
        ("tiers", partial(checked_tiers, Tier.BATCH), [[], ["gold"], ["standard"]]),
        ("models", checks.models, [[], [""], ["x" * 257], [f"m{n}" for n in range(101)]]),
        (
            "allow_from",
            key.networks,
            [["10.0.0.1/8"], ["office"], [""], [f"10.0.{n}.0/24" for n in range(33)]],
        ),
        (
            "labels",
            partial(checked_labels, {"team": ("ads",)}),
            [
                *({name: ["x"]} for name in ("", " team", "a,b", "a=b", "k" * 65)),
                *({"team": [value]} for value in ("", "a\0", "x" * 65)),
                {"none": []},
                {"team": [f"v{n}" for n in range(65)]},
                {f"k{n}": ["x"] for n in range(8)},
            ],
        ),
        ("scopes", key.scopes, [[], ["root"], ["inference", "root"]]),
        (
            "s",
            lambda value: checks.seconds("s", value, 10, least=1),
            [0, 11, math.nan, math.inf, True, "1"],
        ),
        ("reason", checks.reason, ["", " ", "x" * 201, None]),
        ("model", partial(checks.model, "model"), ["", " ", "x" * 257, 7, None]),
        ("until", partial(checks.instant, "until"), ["", "soon", "2026-01-31T00:00", None]),
        ("time_zone", checks.iana_zone, ["", "Mars/Olympus", "../etc/passwd", "x" * 100, "\0"]),
        ("tier", partial(checks.choice, "tier", Tier), ["", "gold", "STANDARD"]),
    ],
)
def test_bad_values_name_their_field(field: str, check: Callable[[Any], object], values: list[Any]) -> None:
    for value in values:
        with pytest.raises(Invalid) as caught:
            check(value)
        assert caught.value.field == field, value


def test_good_values_pass() -> None:
    assert checks.name("name", "Team-7.a_b") == "Team-7.a_b"
    assert [checked_weight(value) for value in (0.01, 1, 1_000)] == [0.01, 1.0, 1_000.0]
    assert checks.iana_zone("America/Argentina/Buenos_Aires")


def test_a_label_that_is_named_is_set_or_dropped_and_the_others_stay() -> None:
    before = {"team": ("ads",), "feature": ("x", "y")}
    after = checked_labels(before, {"team": ["search", "ads", "search"], "feature": [], "env": ["prod"]})
    assert after == {"team": ("ads", "search"), "env": ("prod",)}
    assert before == {"team": ("ads",), "feature": ("x", "y")}


def test_networks_that_are_there_twice_are_one() -> None:
    networks = key.networks(["10.0.0.0/8", "::ffff:10.0.0.0/104"])
    assert [str(each) for each in networks] == ["10.0.0.0/8"]
    assert key.networks(None) == key.networks([]) == ()
