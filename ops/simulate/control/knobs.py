"""The knobs of a simulated pool: those of its queue, its engines and its admission."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from msgspec.structs import replace as with_fields

from engine.messages import EngineKnobs
from gateway.flow.control_rules import Knob
from gateway.pools.control_loop import Setters, queue_setters
from ops.simulate.control.admission import SimulatedAdmission
from ops.simulate.pool import SimulatedPool

ENGINE_KNOBS: Mapping[Knob, Callable[[EngineKnobs, float], EngineKnobs]] = {
    Knob.TOKEN_BUDGET: lambda knobs, value: with_fields(knobs, token_share=value),
    Knob.SLOTS: lambda knobs, value: with_fields(knobs, slot_share=value),
    Knob.PARTIAL_PREFILLS: lambda knobs, value: with_fields(knobs, partial_prefills=round(value)),
    Knob.RESERVE_PERMILLE: lambda knobs, value: with_fields(knobs, reserve_permille=round(value)),
}


def setters_of(pool: SimulatedPool, admission: SimulatedAdmission) -> Setters:
    """By knob: those that the pool has."""
    lends: Setters = {} if pool.budget is None else {Knob.QUOTA: pool.budget.lend}
    return {
        **queue_setters(pool.flow),
        **lends,
        Knob.ADMISSION: partial(setattr, admission, "strictness"),
        **{knob: partial(_set_engines, pool, knob) for knob in ENGINE_KNOBS},
    }


def rests_of(pool: SimulatedPool) -> Mapping[Knob, float]:
    """Where the options of the run put knobs that do not rest where `DEFAULT_BOUNDS` say."""
    options = pool.members[0].engine.table.policy.options
    return {
        Knob.LOOKAHEAD: pool.flow.window.lookahead_sequences,
        Knob.PARTIAL_PREFILLS: options.max_num_partial_prefills or 1,
        Knob.RESERVE_PERMILLE: options.reserve_permille,
        Knob.LONG_SHARE: pool.flow.long_share,
    }


def _set_engines(pool: SimulatedPool, knob: Knob, value: float) -> None:
    knobs = pool.members[0].engine.core.knobs
    pool.set_engine_knobs(ENGINE_KNOBS[knob](knobs, value))
