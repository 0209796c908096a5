"""An offer of a move as shown: how much sooner, for how much more, past whom. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.console.formats import about

SAME = 0.05
"""Waits that differ by less than this part of the longer one are called alike."""
AT_ONCE_S = 0.2


def move_shown(offer: Mapping[str, Any]) -> dict[str, Any]:
    """An offer of the API with its words. `rows`: tier, tokens ahead and wait, here and there."""
    here, there = offer["from"], offer["to"]
    return {
        **offer,
        "sooner": sooner(here["time_left_s"], there["time_left_s"]),
        "factor": factor(here["cost_nanousd"]["p50"], there["cost_nanousd"]["p50"]),
        "starts": starts(here["time_left_s"], there["time_left_s"]),
        "rows": [
            (f"{words}: {side['tier']}", side["tokens_ahead"], _turn(side["time_left_s"]))
            for words, side in (("Now", here), ("Then", there))
        ],
    }


def most_ahead(offers: Sequence[Mapping[str, Any]]) -> int:
    """The longest of the lines, for one scale."""
    lines = [side["tokens_ahead"] or {} for offer in offers for side in (offer["from"], offer["to"])]
    return max((sum(line.values()) for line in lines), default=0)


def sooner(here: Mapping[str, float] | None, there: Mapping[str, float] | None) -> str:
    if here is None or there is None:
        return "When it would start is not known"
    gain_s, longer_s = here["p50"] - there["p50"], max(here["p50"], there["p50"])
    if abs(gain_s) <= max(AT_ONCE_S, SAME * longer_s):
        return "No sooner"
    return f"{about(abs(gain_s))} {'sooner' if gain_s > 0 else 'later'}"


def starts(here: Mapping[str, float] | None, there: Mapping[str, float] | None) -> str:
    if here is None or there is None:
        return "There is no estimate of its wait: estimates are off, or no engine was timed yet."
    return (
        f"Starts {_in(there['p50'])} instead of {_in(here['p50'])};"
        f" nine times in ten within {about(there['p90'])} instead of {about(here['p90'])}."
    )


def factor(before: int, after: int) -> str:
    if before == after:
        return "the same price"
    if not before or not after:
        return "free of charge" if before else "no longer free"
    return f"{after / before:.3g}x the price"


def _turn(left_s: Mapping[str, float] | None) -> str:
    return "not known" if left_s is None else _in(left_s["p50"])


def _in(left_s: float) -> str:
    return "at once" if left_s < AT_ONCE_S else f"in {about(left_s)}"
