"""Fields that an act changed: each with its value before and after, and in one line."""

from __future__ import annotations

from typing import Any

import pytest

from tenants.audit.field_changes import MAX_SHOWN, FieldChange, changes, words


def test_only_fields_that_changed_are_shown_also_within_others() -> None:
    before = {"name": "a", "weight": 1.0, "labels": {"team": ["x"], "env": ["p"]}, "gone": None}
    after = {"name": "a", "weight": 2.0, "labels": {"team": ["x", "y"], "env": ["p"]}, "new": True}
    assert changes(before, after) == [
        FieldChange("weight", "1.0", "2.0"),
        FieldChange("labels.team", '["x"]', '["x","y"]'),
        FieldChange("gone", "null", None),
        FieldChange("new", None, "true"),
    ]
    assert changes({"labels": {}}, {"labels": {"team": ["x"]}}) == [FieldChange("labels.team", None, '["x"]')]
    assert changes(None, {"name": "a"}) == [FieldChange("name", None, "a")]
    assert changes({"name": "a"}, None) == [FieldChange("name", "a", None)]
    assert changes(None, None) == []
    [long] = changes({}, {"text": "x" * 500})
    assert long.after == "x" * MAX_SHOWN + "…"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (None, {"name": "acme"}, "made"),
        ({"name": "acme"}, None, "removed"),
        (None, None, ""),
        ({"weight": 1.0, "name": "a"}, {"weight": 3.0, "name": "a"}, "weight 1.0 -> 3.0"),
        ({"models": None}, {"models": ["x" * 60]}, 'models null -> ["' + "x" * 37 + "…"),
        ({}, {str(n): n for n in range(9)}, ", ".join(f"{n} null -> {n}" for n in range(6)) + " and 3 more"),
    ],
)
def test_a_change_is_said_in_a_few_words(before: Any, after: Any, said: str) -> None:
    assert words(before, after) == said
