"""The knobs of a simulated pool: those of its queue, its engines and its admission."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from gateway.flow.control_rules import Knob
from gateway.pools.control_loop import Setters, queue_setters
from gateway.pools.engine_knobs import engine_setters
from ops.simulate.control.admission import SimulatedAdmission
from ops.simulate.pool import SimulatedPool


def setters_of(pool: SimulatedPool, admission: SimulatedAdmission) -> Setters:
    """By knob: those that the pool has."""
    lends: Setters = {} if pool.budget is None else {Knob.QUOTA: pool.budget.lend}
    return {
        **queue_setters(pool.flow),
        **lends,
        Knob.ADMISSION: partial(setattr, admission, "strictness"),
        **engine_setters(pool.set_engine_knobs),
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
