"""Length forecasts with and without sketches of end users and conversations, on two committed traces.

Both traces hold lengths only (`ops/bench/data/ATTRIBUTION.md`): conversations known by the blocks that their
prompts share, and the requests of a service's clients, each taken for one end user of a single tenant. Every
answer is foretold before it is learned from. *With*: what a gateway says, the gate included. *Without*: the
same for requests that name no user and whose prompts are unlike each other.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from engine.forecast.length.features import Features, features_of
from engine.forecast.length.length import LengthForecast
from engine.forecast.length.scores import QUANTILES, LayerScore
from ops.bench.routing import read_trace
from ops.reporting import table

USERS_FILE = Path(__file__).parents[1] / "data" / "users.csv"
ANSWERS = 2000
LEARNED_FIRST = 200
"""Answers that are not scored: until then there is next to nothing to tell apart."""
TENANT, MODEL = "bench", "traced"


def run() -> dict[str, Any]:
    """`ok` where each sketch lowers the loss on its trace."""
    found = {"conversation": _compare(_conversations()), "user": _compare(_users())}
    ok = all(each["with"]["pinball_tokens"] < each["without"]["pinball_tokens"] for each in found.values())
    return found | {"ok": ok}


def _compare(traced: Iterable[tuple[Features, int]]) -> dict[str, Any]:
    forecasts = {"without": LengthForecast(), "with": LengthForecast()}
    scores = {name: LayerScore() for name in forecasts}
    for number, (features, length) in enumerate(traced):
        bare = Features(features.places, features.values)
        for (name, forecast), said in zip(forecasts.items(), (bare, features), strict=True):
            if number >= LEARNED_FIRST:
                scores[name].observe(forecast.quantiles(TENANT, MODEL, QUANTILES, features=said), length)
            forecast.observe(TENANT, MODEL, length, said)
    layer = forecasts["with"].layer(TENANT, MODEL)
    return {name: score.report() for name, score in scores.items()} | {"used": layer}


def _conversations() -> Iterator[tuple[Features, int]]:
    for each in read_trace(ANSWERS):
        # Full blocks only: the last one may be partial.
        yield features_of("", prompt_tokens=each.input_tokens, blocks=each.blocks[:-1]), each.output_tokens


def _users() -> Iterator[tuple[Features, int]]:
    with USERS_FILE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield features_of("", prompt_tokens=1, user=row["user"]), int(row["output_tokens"])


def show(report: dict[str, Any]) -> None:
    """The table for people."""
    rows = [
        (
            f"{group} trace: {name} sketches of it",
            report[group][name]["samples"],
            f"{report[group][name]['pinball_tokens']:.2f}",
            f"{report[group][name]['mean_error_tokens']:.1f}",
            f"{report[group][name]['p90_coverage']:.0%}",
            report[group]["used"] if name == "with" else "",
        )
        for group in ("conversation", "user")
        for name in ("without", "with")
    ]
    columns = ("", "answers", "pinball loss", "mean error", "p90 covers", "used")
    table("output length by end user and conversation, tokens", columns, rows)
