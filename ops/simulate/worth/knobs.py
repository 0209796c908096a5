"""Knobs in a replay: how they are put, and which of the control loop's a replay cannot judge."""

from __future__ import annotations

from collections.abc import Container, Mapping

from gateway.flow.control_rules import Knob
from gateway.pools.control_loop import Setters

NOT_SIMULATED: Mapping[Knob, str] = {
    Knob.PREFIX_WEIGHT: "prompts are not kept, so a replay does not know which of them begin alike",
    Knob.EARLY_REFUSAL: "a recording does not say which deadlines requests had",
    Knob.RESERVE_QUANTILE: "what is held for a request is that of the recording",
    Knob.QUOTA: "limits are replayed as they were set",
}
"""Knobs whose turning changes nothing that a replay of recorded traffic can show, each with the reason."""
UNKNOWN = "the simulator has no such knob"


def put(setters: Setters, knobs: Mapping[Knob, float]) -> None:
    """Turns the knobs that there are to these values; others are left out."""
    for knob, value in knobs.items():
        if knob in setters:
            setters[knob](value)


def not_simulated(knob: Knob, simulated: Container[Knob]) -> str:
    """Why a replay cannot say what a move of this knob was worth; empty: it can. `simulated`: the knobs that
    the simulated pool has."""
    return NOT_SIMULATED.get(knob, "" if knob in simulated else UNKNOWN)
