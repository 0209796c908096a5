"""The knobs of a simulated pool: those of its queue, its engines and its admission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from engine.scheduling.admit.reserve import PredictedReserve
from engine.scheduling.compose.token_fair import TokenFair
from gateway.flow.control_rules import Knob
from gateway.pools.control_loop import Setters, queue_setters
from ops.simulate.admission import SimulatedAdmission
from ops.simulate.pool import SimulatedPool


def setters_of(pool: SimulatedPool, admission: SimulatedAdmission) -> Setters:
    """By knob."""
    return {
        **queue_setters(pool.flow),
        Knob.LONG_SHARE: partial(_set_long_share, pool),
        Knob.TOKEN_BUDGET: partial(_set_token_budget, pool),
        Knob.SLOTS: partial(_set_slots, pool),
        Knob.PARTIAL_PREFILLS: partial(_set_partial_prefills, pool),
        Knob.RESERVE_PERMILLE: partial(_set_reserve, pool),
        Knob.ADMISSION: partial(setattr, admission, "strictness"),
    }


def rests_of(pool: SimulatedPool) -> Mapping[Knob, float]:
    """Where the options of the run put knobs that a learned table moves, or the control loop."""
    options, lanes = pool.members[0].engine.table.policy.options, pool.flow.placement.lanes
    return {
        Knob.LOOKAHEAD: pool.flow.window.lookahead_sequences,
        Knob.SLOTS: min(1.0, options.slots / pool.machine.max_sequences) or 1.0,
        Knob.PARTIAL_PREFILLS: options.max_num_partial_prefills or 1,
        Knob.RESERVE_PERMILLE: options.reserve_permille,
        Knob.LONG_SHARE: min(lanes.share_sequences, lanes.share_kv),
    }


def _set_long_share(pool: SimulatedPool, share: float) -> None:
    placement = pool.flow.placement
    placement.lanes = replace(placement.lanes, share_sequences=share, share_kv=share)


def _set_token_budget(pool: SimulatedPool, share: float) -> None:
    for member in pool.members:
        member.engine.core.set_token_budget(share)


def _set_slots(pool: SimulatedPool, share: float) -> None:
    slots = 0 if share >= 1 else max(1, round(share * pool.machine.max_sequences))
    for member in pool.members:
        compose = member.engine.table.policy.compose
        if isinstance(compose, TokenFair):
            compose.slots = slots


def _set_partial_prefills(pool: SimulatedPool, prompts: float) -> None:
    for member in pool.members:
        compose = member.engine.table.policy.compose
        if isinstance(compose, TokenFair):
            compose.max_num_partial_prefills = round(prompts)


def _set_reserve(pool: SimulatedPool, permille: float) -> None:
    for member in pool.members:
        table = member.engine.table
        admit = table.policy.admit
        if isinstance(admit, PredictedReserve):
            table.policy = replace(table.policy, admit=replace(admit, permille=round(permille)))
