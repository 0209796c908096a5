"""The knobs of a simulated pool: what turns them, and which of the control loop's it does not have."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial

from gateway.flow.control_rules import Knob
from gateway.pools.control_loop import Setters, queue_setters
from ops.simulate.admission import SimulatedAdmission
from ops.simulate.pool import SimulatedPool

NOT_SIMULATED: Mapping[Knob, str] = {
    Knob.PREFIX_WEIGHT: "prompts are not kept, so a replay does not know which of them begin alike",
    Knob.EARLY_REFUSAL: "a recording does not say which deadlines requests had",
    Knob.RESERVE_QUANTILE: "what is held for a request is that of the recording",
    Knob.QUOTA: "limits are replayed as they were set",
}
"""Knobs whose turning changes nothing that a replay of recorded traffic can show, each with the reason."""
UNKNOWN = "the simulator has no such knob"


def knob_setters(pool: SimulatedPool, admission: SimulatedAdmission) -> Setters:
    """What turns the knobs that a simulated pool has."""
    return {
        **queue_setters(pool.flow),
        Knob.TOKEN_BUDGET: partial(_set_token_budget, pool),
        Knob.ADMISSION: partial(setattr, admission, "strictness"),
    }


def put(setters: Setters, knobs: Mapping[Knob, float]) -> None:
    """Turns the knobs that there are to these values; others are left out."""
    for knob, value in knobs.items():
        if knob in setters:
            setters[knob](value)


def not_simulated(knob: Knob, simulated: Container[Knob]) -> str:
    """Why a replay cannot say what a move of this knob was worth; empty: it can. `simulated`: the knobs that
    the simulated pool has."""
    return NOT_SIMULATED.get(knob, "" if knob in simulated else UNKNOWN)


def _set_token_budget(pool: SimulatedPool, share: float) -> None:
    for member in pool.members:
        member.engine.core.set_token_budget(share)
