"""Templates of the forecast benchmark."""

from __future__ import annotations

import random

import pytest

from engine.forecast.length.features import features_of
from ops.bench.estimates import forecast_groups
from ops.bench.estimates.forecast import PARTS, deal
from ops.bench.estimates.forecast_queue import WAYS, Foretold, measure_waits
from ops.bench.estimates.forecast_traffic import FAMILY_SHARES, AnsweredInstruction, template_of
from ops.demo.training.instructions import make_instruction


@pytest.mark.parametrize(
    ("family", "one", "other"),
    [
        ("count", "Count from 3 to 57.", "count from 12 to 90"),
        ("repeat", 'Repeat "abc" 1 time.', "Repeat 'xyzzy' 5 times."),
        ("spell", 'How do you spell "tin"?', "how do you spell wisemo?"),
        (
            "days",
            "List the days from Monday to Friday.",
            "List the days from Sunday to Monday, one per line.",
        ),
        ("sort", "Sort the letters a, c, b.", "Sort the letters x, y, q, z."),
        ("reverse", "Reverse the list 1, 2, 3.", "Reverse the list 4, 5, 6, 7, 8"),
        ("facts", "Is an apple a fruit?", "Is gold a metal?"),
    ],
)
def test_the_same_words_are_the_same_template_whatever_varies(family: str, one: str, other: str) -> None:
    assert template_of(family, one) == template_of(family, other)


def test_other_words_are_other_templates_and_there_are_not_many() -> None:
    assert template_of("count", "Count from 3 to 5.") != template_of("count", "Please count from 3 to 5.")
    rng = random.Random(1)
    found = {
        template_of(family, make_instruction(family, rng, held_out=None).prompt)
        for family in FAMILY_SHARES
        for _ in range(400)
    }
    assert 40 <= len(found) <= 80


def test_no_template_is_in_two_parts_and_each_part_has_some_of_a_family() -> None:
    rng = random.Random(2)
    features = features_of("x", prompt_tokens=1)
    answered = []
    for _ in range(600):
        family = rng.choice(list(FAMILY_SHARES))
        template = template_of(family, make_instruction(family, rng, held_out=None).prompt)
        answered.append(AnsweredInstruction(family, template, features, 3, ()))
    parts = deal(answered)
    assert set(parts) == set(range(PARTS))
    for template in {each.template for each in answered}:
        assert (
            len({part for each, part in zip(answered, parts, strict=True) if each.template == template}) == 1
        )
    assert {part for each, part in zip(answered, parts, strict=True) if each.family == "count"} == {0, 1, 2}


def test_on_the_committed_traces_users_and_conversations_lower_the_loss() -> None:
    report = forecast_groups.run()
    assert report["ok"]
    for group, at_most in (("conversation", 1.0), ("user", 0.5)):
        found = report[group]
        assert found["used"] == group
        assert found["with"]["samples"] == found["without"]["samples"] == 1800
        assert found["with"]["pinball_tokens"] < at_most * found["without"]["pinball_tokens"]


def test_waits_are_foretold_the_better_the_more_is_known_of_what_goes_first() -> None:
    rng = random.Random(3)
    lengths = [rng.choice((4, 300)) for _ in range(400)]
    unsure = [Foretold(length, (40, 300), (length, length + 1)) for length in lengths]
    sure = [Foretold(length, (length, length + 1), (length, length + 1)) for length in lengths]
    learned = [
        AnsweredInstruction("count", "t", features_of("x", prompt_tokens=1), each, ()) for each in lengths
    ]
    errors = [
        [each["mean_error_s"] for each in measure_waits(told, learned, random.Random(1))["ways"].values()]
        for told in (unsure, sure)
    ]
    assert len(errors[0]) == len(WAYS)
    assert errors[0][1] < errors[0][0]
    assert errors[0][2] == errors[0][1], "a guess is not gone by"
    assert errors[1][2] < 0.3 * errors[1][0]
