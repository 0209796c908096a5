"""What sketches of users and conversations bring on real traces."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator

import pytest

from engine.forecast.length.features import Features, features_of
from engine.forecast.length.length import LengthForecast
from engine.forecast.length.scores import QUANTILES, LayerScore
from tests.support.conversations import DATA, read_trace

ANSWERS = 2000
LEARNED_FIRST = 200
"""Answers that are not scored: until then there is next to nothing to tell apart."""


def _conversations() -> Iterator[tuple[Features, int]]:
    for conversation in read_trace(ANSWERS):
        full = conversation.blocks[:-1]  # the last one may be partial
        features = features_of("", prompt_tokens=conversation.input_tokens, blocks=full)
        yield features, conversation.output_tokens


def _users() -> Iterator[tuple[Features, int]]:
    with (DATA / "users.csv").open(newline="", encoding="utf-8") as file:
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
