"""Templates of the traffic that forecasts learn from, and what sketches of users and conversations bring."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ops.bench
from engine.forecast.length.features import Features, features_of
from engine.forecast.length.length import LengthForecast
from engine.forecast.length.scores import QUANTILES, LayerScore
from ops.bench.estimates.forecast_traffic import FAMILY_SHARES, template_of
from ops.bench.routing import read_trace
from ops.demo.training.instructions import make_instruction

USERS_FILE = Path(ops.bench.__file__).parent / "data" / "users.csv"
ANSWERS = 2000
LEARNED_FIRST = 200
"""Answers that are not scored: until then there is next to nothing to tell apart."""


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


def _conversations() -> Iterator[tuple[Features, int]]:
    for each in read_trace(ANSWERS):
        # Full blocks only: the last one may be partial.
        yield features_of("", prompt_tokens=each.input_tokens, blocks=each.blocks[:-1]), each.output_tokens


def _users() -> Iterator[tuple[Features, int]]:
    with USERS_FILE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield features_of("", prompt_tokens=1, user=row["user"]), int(row["output_tokens"])


@pytest.mark.parametrize(
    ("traced", "layer", "at_most"), [(_conversations, "conversation", 1.0), (_users, "user", 0.5)]
)
def test_on_the_committed_traces_users_and_conversations_lower_the_loss(
    traced: Callable[[], Iterator[tuple[Features, int]]], layer: str, at_most: float
) -> None:
    """Beside the same requests that name no user and whose prompts are unlike each other; each answer is
    foretold before it is learned from."""
    forecasts = {"without": LengthForecast(), "with": LengthForecast()}
    scores = {name: LayerScore() for name in forecasts}
    for number, (features, length) in enumerate(traced()):
        bare = Features(features.places, features.values)
        for (name, forecast), said in zip(forecasts.items(), (bare, features), strict=True):
            if number >= LEARNED_FIRST:
                scores[name].observe(forecast.quantiles("t", "m", QUANTILES, features=said), length)
            forecast.observe("t", "m", length, said)
    assert forecasts["with"].layer("t", "m") == layer
    found = {name: score.report() for name, score in scores.items()}
    assert found["with"]["samples"] == found["without"]["samples"] == ANSWERS - LEARNED_FIRST
    assert found["with"]["pinball_tokens"] < at_most * found["without"]["pinball_tokens"]
