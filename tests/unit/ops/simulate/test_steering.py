"""A learned table at work on a simulated pool, and beside the control loop."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from engine.messages import EngineKnobs
from gateway.flow.control_rules import ControlMode
from gateway.flow.knobs import Knob
from gateway.flow.learned.actions import HYBRID, Actions
from gateway.flow.learned.macro_state import NUM_STATES, SeenRange, Situation
from gateway.flow.learned.switch import HOLDS_S
from gateway.flow.learned.table_file import LearnedTable
from ops.simulate.control.steering import Steering
from ops.simulate.learn.trial import queue_as_served
from ops.simulate.pool import SimulatedPool
from tests.support.bursty_traffic import SETUP, bursty
from tests.support.learned_tables import learned_table

WIDE = SeenRange(queued_per_place=1e6, kv_share=1.0, trend=1e6)
QUEUED = Actions(slots=0.5, reserve_permille=250, partial_prefills=1, ageing=0.5)
"""Refuses nothing."""
BY_QUEUE = learned_table(
    {**dict.fromkeys(range(4), HYBRID), **dict.fromkeys(range(4, NUM_STATES), QUEUED)}, fitted=WIDE
)


def served(
    table: LearnedTable | None, mode: ControlMode = ControlMode.OFF, seconds: float = 100.0
) -> tuple[SimulatedPool, Steering, Sequence[Situation]]:
    seen: list[Situation] = []
    steering = Steering(mode, SETUP.slo, table, on_situation=seen.append)
    flow = queue_as_served(SETUP.machine)
    pool = SimulatedPool("hybrid", SETUP.machine, watch=steering.watch, flow=flow)
    pool.run(bursty(seconds))
    return pool, steering, seen


def test_the_table_is_asked_once_a_look_and_its_moves_have_times_and_reasons() -> None:
    _, steering, seen = served(BY_QUEUE)
    assert steering.switch is not None
    assert steering.switch.lookups == len(seen) > 40
    moves = [move for move in steering.moves if move.knob is Knob.RESERVE_PERMILLE]
    assert {(move.before, move.after) for move in moves} == {(500, 250), (250, 500)}
    assert all(move.is_made and move.reason.startswith("learned: ") for move in moves)
    gaps_s = [later.at_s - earlier.at_s for earlier, later in pairwise(moves)]
    assert gaps_s
    assert min(gaps_s) >= HOLDS_S


def test_the_knobs_of_engines_and_queue_stand_where_the_table_says() -> None:
    everywhere = learned_table(dict.fromkeys(range(NUM_STATES), QUEUED), fitted=WIDE)
    pool, _, _ = served(everywhere, seconds=40.0)
    core = pool.members[0].engine.core
    assert core.knobs == EngineKnobs(slot_share=0.5, partial_prefills=1, reserve_permille=250)
    assert pool.flow.knobs.ageing == 0.5
    assert len(list(pool.records.done())) == len(pool.records)


def test_a_table_that_says_what_hybrid_does_changes_nothing() -> None:
    as_hybrid = learned_table(dict.fromkeys(range(NUM_STATES), HYBRID), fitted=WIDE)
    (pool, steering, _), (plain, _, _) = served(as_hybrid), served(None)
    assert steering.moves == []
    assert pool.records.last_s == plain.records.last_s
    assert not steering.foresees


def test_outside_of_what_was_fitted_the_run_is_hybrids() -> None:
    nothing = learned_table(
        dict.fromkeys(range(NUM_STATES), QUEUED), fitted=SeenRange(queued_per_place=0, kv_share=0, trend=0)
    )
    (pool, steering, _), (plain, _, _) = served(nothing), served(None)
    assert steering.switch is not None
    assert steering.switch.is_outside
    assert pool.records.last_s == plain.records.last_s
    assert pool.members[0].engine.core.knobs.reserve_permille in (None, 500)


def test_admission_of_a_table_refuses_requests_that_would_be_late() -> None:
    strict = learned_table(dict.fromkeys(range(NUM_STATES), Actions(admission=1.0)), fitted=WIDE)
    pool, steering, _ = served(strict)
    plain, _, _ = served(None)
    assert steering.foresees
    assert sum(pool.records.refused) > 0
    met, without = (
        sum(SETUP.slo.met(each.records, row) for row in range(len(each.records))) for each in (pool, plain)
    )
    assert met > without


@pytest.mark.parametrize("mode", [ControlMode.ADVICE, ControlMode.ACTING])
def test_the_table_is_in_force_in_every_mode_of_the_control_loop(mode: ControlMode) -> None:
    everywhere = learned_table(dict.fromkeys(range(NUM_STATES), QUEUED), fitted=WIDE)
    pool, steering, _ = served(everywhere, mode, seconds=30.0)
    assert pool.members[0].engine.core.knobs.reserve_permille == 250
    assert any(move.knob is Knob.SLOTS and move.is_made for move in steering.moves)
