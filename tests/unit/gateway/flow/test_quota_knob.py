"""Spare capacity is lent to tier batch, and goes back at once when others need it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.flow.control_rules import REVERSAL_S, Control, ControlMode, Observation
from gateway.flow.knobs import Knob

QUIET = Observation(1.0, 0.5, 0.1, 0.0, 0.02, None, 0)
IDLE = replace(QUIET, spare_share=0.9)
WAITING = replace(IDLE, higher_waits=True)
EVERY_S = 2.0


def quota(control: Control, seen: Observation, now_s: float) -> float:
    control.look(seen, now_s)
    return control.values[Knob.QUOTA]


def test_while_the_machine_is_idle_it_rises_step_by_step_and_stays() -> None:
    control = Control(ControlMode.ACTING)
    assert [quota(control, IDLE, EVERY_S * look) for look in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert [move.reason for move in control.moves] == ["spare capacity (0.90)"] * 4
    used = replace(QUIET, spare_share=0.25)
    assert quota(control, used, 100.0) == 1.0, "what it lends uses some of what was idle"
    assert quota(Control(ControlMode.ACTING), used, 0.0) == 0.0, "it would not begin there"


@pytest.mark.parametrize(
    "needed", [WAITING, replace(IDLE, expected_late=0.1), replace(IDLE, attainment=0.8, queued=3)]
)
def test_what_others_need_goes_back_at_once_and_whole(needed: Observation) -> None:
    control = Control(ControlMode.ACTING)
    for look in range(4):
        quota(control, IDLE, EVERY_S * look)
    [move] = [each for each in control.look(needed, 8.0) if each.knob is Knob.QUOTA]
    assert (move.before, move.after, move.is_made) == (1.0, 0.0, True)
    assert move.reason == "a higher tier waits, or targets are about to be missed (1.00)"


def test_after_it_went_back_it_rises_no_sooner_than_in_a_minute() -> None:
    control = Control(ControlMode.ACTING)
    quota(control, IDLE, 0.0)
    assert quota(control, WAITING, 2.0) == 0.0
    assert [quota(control, IDLE, 2.0 + since) for since in (2.0, 30.0, REVERSAL_S - 0.1)] == [0.0] * 3
    assert quota(control, IDLE, 2.0 + REVERSAL_S) == 0.25


def test_when_nothing_is_spare_any_more_and_nobody_waits_it_returns_as_other_knobs_do() -> None:
    control = Control(ControlMode.ACTING)
    for look in range(4):
        quota(control, IDLE, EVERY_S * look)
    busy = replace(QUIET, spare_share=0.1)
    assert quota(control, busy, 8.0) == 1.0
    back_s = 6.0 + 2 * REVERSAL_S
    assert [quota(control, busy, back_s + EVERY_S * look) for look in range(4)] == [0.75, 0.5, 0.25, 0.0]


def test_its_turns_keep_no_other_knob_from_turning() -> None:
    control = Control(ControlMode.ACTING)
    quota(control, IDLE, 0.0)
    quota(control, WAITING, 1.0)
    control.look(replace(QUIET, kv_share=0.99), 60.0)
    assert control.values[Knob.BATCH_CAP] == 0.875
    assert quota(control, IDLE, 150.0) == 0.25, "it turns"
    assert control.values[Knob.BATCH_CAP] == 0.875, "who only returns to rest waits two minutes"
    control.look(IDLE, 60.0 + 2 * REVERSAL_S)
    assert control.values[Knob.BATCH_CAP] == 1.0, "and no third one for the other's sake"


def test_advice_and_off_lend_nothing() -> None:
    for mode in (ControlMode.ADVICE, ControlMode.OFF):
        control = Control(mode)
        for look in range(4):
            control.look(IDLE, EVERY_S * look)
        assert control.in_force[Knob.QUOTA] == 0.0
        assert not any(move.is_made for move in control.moves)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.builds(
                lambda spare, waits, late: replace(
                    QUIET, spare_share=spare, higher_waits=waits, expected_late=late
                ),
                st.floats(0, 1),
                st.booleans(),
                st.sampled_from((0.0, 0.0, 0.2)),
            ),
            st.floats(0.1, 40.0),
        ),
        max_size=60,
    )
)
def test_nothing_is_lent_while_others_wait_and_it_rises_once_a_minute(
    looks: list[tuple[Observation, float]],
) -> None:
    control, now_s = Control(ControlMode.ACTING), 0.0
    fell_s = -REVERSAL_S
    before = 0.0
    for seen, gap_s in looks:
        now_s += gap_s
        after = quota(control, seen, now_s)
        assert 0.0 <= after <= 1.0
        if seen.higher_waits or seen.expected_late:
            assert after == 0.0
        if after > before:
            assert now_s - fell_s >= REVERSAL_S - 1e-9
            assert after - before <= 0.25
            assert seen.spare_share > 0.2
        fell_s = now_s if after < before else fell_s
        before = after
