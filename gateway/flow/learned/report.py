"""A learned table in words: for each macro-state what is done otherwise than `hybrid` does, what it was
fitted on, and what it was worth on requests that it had not seen. Pure."""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from gateway.flow.learned.actions import HYBRID, Actions
from gateway.flow.learned.macro_state import NUM_STATES, words
from gateway.flow.learned.table_file import Judged, LearnedTable

UNLIKE_WORDS = {
    "slots": "{0:.0%} of the sequences get decode tokens in a step",
    "token_budget": "{0:.0%} of a step's tokens",
    "partial_prefills": "at most {0:g} unfinished prompts of a tenant",
    "long_share": "the long lane may hold {0:.0%} of an engine",
    "admission": "requests are refused whose expected time, times {0:g}, is beyond their target",
    "reserve_permille": "memory is set aside for {0:g} thousandths of the predicted output",
    "ageing": "requests move up a tier after {0:.0%} of the time",
}
"""By knob, of a value that is not hybrid's."""


def table_as_json(table: LearnedTable) -> dict[str, Any]:
    """The table for people and programs: all macro-states, those that the fit has not seen too."""
    entries = table.by_state()
    return {
        "fit": {
            "model": table.model,
            "machine": table.machine,
            "trace": table.trace,
            "seed": table.seed,
            "simulated_requests": table.simulated_requests,
            "borders": asdict(table.borders),
            "most_seen": asdict(table.fitted),
        },
        "judged": None if table.judged is None else asdict(table.judged),
        "verdict": verdict(table.judged),
        "states": [
            {
                "state": state,
                "words": words(state),
                "share": 0.0 if entry is None else entry.share,
                "actions": None if entry is None or not entry.share else asdict(entry.actions),
                "unlike_hybrid": [] if entry is None or not entry.share else unlike_hybrid(entry.actions),
            }
            for state, entry in ((state, entries[state]) for state in range(NUM_STATES))
        ],
    }


def unlike_hybrid(actions: Actions) -> list[str]:
    """What differs from what hybrid does, each in words."""
    own = asdict(HYBRID)
    return [UNLIKE_WORDS[name].format(value) for name, value in asdict(actions).items() if value != own[name]]


def state_words(shown: dict[str, Any]) -> str:
    """What a state of `table_as_json` does."""
    if shown["actions"] is None:
        return "never seen: as hybrid"
    return "; ".join(shown["unlike_hybrid"]) or "as hybrid"


def at_work_words(shown: dict[str, Any]) -> str:
    """What a learned policy does now in one pool, of `LearnedActions.as_json`."""
    if shown["problem"]:
        return f"{shown['problem']}; the actions of hybrid are in force"
    if shown["is_outside"]:
        return "outside of what the table was fitted on; the actions of hybrid are in force"
    if shown["macro_state"] is None:
        return "no macro-state is taken on yet; the actions of hybrid are in force"
    actions = ", ".join(f"{name} {value:g}" for name, value in shown["actions"].items())
    return f"macro-state {shown['macro_state']} ({shown['words']}): {actions}"


def verdict(judged: Judged | None) -> str:
    """Whether the table wins on requests that it had not seen, also where it does not."""
    if judged is None:
        return "it was not judged on requests that it had not seen"
    gain = judged.hybrid - judged.learned
    sums = f"its sum is {judged.learned:.4g}, that of hybrid {judged.hybrid:.4g}"
    if gain > judged.spread:
        by = f"{gain:.3g} less (spread {judged.spread:.3g})"
        return f"it wins on requests that it had not seen: {sums}, {by}"
    how = f"the difference is within the spread ({judged.spread:.3g})" if gain > 0 else "it is no better"
    return f"it does not win on requests that it had not seen: {sums}; {how}"
