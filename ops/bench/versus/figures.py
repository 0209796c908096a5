"""Figures of the comparison: medians over rounds, and whether a client was the bottleneck. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ops.bench.common.report import spread, spread_text
from ops.sandbox.core_use import CoreUse

TOO_BUSY = 0.8
"""A client that runs or waits for a core for more of the time was the bottleneck."""


@dataclass(frozen=True, slots=True)
class VersusLine:
    """One line of the table: a figure of each round's row."""

    key: str
    what: str
    wanted: str
    spec: str
    title: str


LINES = (
    VersusLine(
        "flood_ratio",
        "How much slower a quiet tenant gets when another floods (1 = not at all)",
        *("1", ".1f", "Slowdown of a quiet tenant beside a flood"),
    ),
    VersusLine(
        "weights_ratio",
        "How many times more tokens weight 3 gets than weight 1",
        *("3", ".2f", "Tokens of weight 3 for each of weight 1"),
    ),
    VersusLine(
        "overshoot_tokens",
        "Tokens beyond a hard limit, 50 requests at once",
        *("0", ",.0f", "Tokens beyond a hard limit"),
    ),
    VersusLine(
        "uncharged_tokens",
        "Tokens delivered but never billed when the gateway is killed (`kill -9`)",
        *("0", ",.0f", "Tokens delivered but never billed (kill -9)"),
    ),
)
WHY = "Says why a request waited"


def busy_share(first: CoreUse, last: CoreUse) -> float:
    """Part of the time between two readings in which the process ran or waited for a core."""
    wall_s = last.at_s - first.at_s
    wanted_s = last.ran_s - first.ran_s + last.waited_s - first.waited_s
    return wanted_s / wall_s if wall_s > 0 else 0.0


def bottlenecks(rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    return [
        f"round {number} of {name}: the {phase} clients ran or waited for a core for {share:.0%} of the time"
        for name, rows in rounds.items()
        for number, row in enumerate(rows, 1)
        for phase, share in row["client_busy"].items()
        if share > TOO_BUSY
    ]


def summary(rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """By stack: each line's spread, and whether it explained waits in every round."""
    return {
        name: {line.key: spread([row[line.key] for row in rows]) for line in LINES}
        | {"why": all(row["why"] for row in rows), "why_words": next((row["why"] for row in rows), None)}
        for name, rows in rounds.items()
    }


def markdown(stacks: Mapping[str, Mapping[str, Any]]) -> str:
    head = ["", *stacks, "ideal"]
    lines = [head, ["---"] * len(head)]
    for line in LINES:
        figures = [spread_text(stack[line.key], line.spec) for stack in stacks.values()]
        lines.append([line.what, *figures, line.wanted])
    lines.append([WHY, *("yes" if stack["why"] else "no" for stack in stacks.values()), "yes"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
