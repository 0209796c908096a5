"""A missed target as shown: its cause, what to do, and the counterfactuals on one scale. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.console import formats
from tenants.outcomes import Cause

Bar = tuple[str, float, str, str]
"""Name, seconds, colour class, words."""

METRICS = {"ttft": "time to the first token", "tpot": "time for each further token", "e2e": "whole time"}
WHY = {
    Cause.REQUEST: "Alone on an idle engine it would have missed its target, too.",
    Cause.QUOTA: "Without its tenant’s own limits, or its tenant’s other requests, it would have met its"
    " target.",
    Cause.CAPACITY: "Under an ideal fair share it would have missed its target, too: there was too little for"
    " all requests.",
    Cause.SCHEDULING: "Under an ideal fair share it would have met its target: the policy here is to blame.",
    Cause.GATEWAY: "The gateway or its stores were late: without that it would have met its target.",
    Cause.FAULT: "An engine, a store or an upstream failed on its way.",
    Cause.CLIENT: "Its client read the answer too slowly.",
    Cause.UNKNOWN: "There is no step-time model of the server that ran it, or no record of the load.",
}
WHAT_TO_DO = {
    Cause.REQUEST: "Shorten the prompt, ask for fewer tokens, or set a target that such a request can meet.",
    Cause.QUOTA: "Raise the tenant’s limit, or let the tenant send fewer requests at a time.",
    Cause.CAPACITY: "Add a replica, or move work that can wait to a lower tier.",
    Cause.SCHEDULING: "Replay this time with other policies (fairgate whatif) and choose one that would have"
    " met the target.",
    Cause.GATEWAY: "Give the gateway a free core and its database a faster disk, or add a gateway.",
    Cause.FAULT: "Look at the upstreams and the log of that time, and mend what failed.",
    Cause.CLIENT: "Read the stream faster, or ask for the answer in one piece.",
    Cause.UNKNOWN: "Nothing follows from this one alone: look at the waits of its timeline.",
}
COMPARED = {
    "alone_s": "alone",
    "fair_s": "fair share",
    "fair_without_outages_s": "fair, no outages",
    "fair_without_own_s": "fair, without own",
}
WAITED = {
    "limited_s": "for its tenant’s own limits before the line",
    "store_s": "for stores to hold its budget",
    "first_lag_s": "until the gateway had the engine’s first token",
    "last_lag_s": "until the gateway had its last token",
    "rested_s": "for its tenant’s rate while it decoded",
    "stalled_s": "for its reader",
}


def cause_words(words: Mapping[Cause, str], cause: str) -> str:
    """Empty for a cause that a newer version wrote."""
    return words[Cause(cause)] if cause in tuple(Cause) else ""


def miss_shown(miss: Mapping[str, Any]) -> dict[str, Any]:
    """A miss of the API with its words and bars. `left_out`: counterfactuals without a bar, and why."""
    evidence: Mapping[str, float | None] = miss["evidence"]
    target_s, actual_s = miss["target_s"], miss["actual_s"]
    bars: list[Bar] = []
    left_out: list[str] = []
    if actual_s is None:
        left_out.append("actual: it never got there")
    else:
        bars.append(("actual", actual_s, "fill-bad", formats.seconds(actual_s)))
    for name, words in COMPARED.items():
        value = evidence.get(name)
        if value is not None:
            fill = "fill-3" if value <= target_s else "fill-2"
            bars.append((words, value, fill, formats.seconds(value)))
        elif name in evidence:
            left_out.append(f"{words}: never, or not computed because another answer decides")
    if not any(name in evidence for name in COMPARED):
        left_out.append("alone and fair share: not known")
    waits = [
        f"{formats.seconds(value)} {words}" for name, words in WAITED.items() if (value := evidence.get(name))
    ]
    return {
        **miss,
        "metric_words": METRICS.get(miss["metric"], miss["metric"]),
        "why": cause_words(WHY, miss["cause"]),
        "todo": cause_words(WHAT_TO_DO, miss["cause"]),
        "bars": bars,
        "left_out": left_out,
        "waits": waits,
    }
