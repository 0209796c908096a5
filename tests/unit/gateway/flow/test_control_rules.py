"""The control loop moves the right knobs, within bounds, without oscillation, and only in acting mode."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.flow.control_rules import (
    ADMISSION_REVERSAL_S,
    BURSTS_S,
    REVERSAL_S,
    Control,
    ControlMode,
    Observation,
)
from gateway.flow.deadline_check import FIRM, LENIENT
from gateway.flow.knobs import DEFAULT_BOUNDS, Bounds, Knob

EVERY_S = 5.0


def seen(
    kv: float = 0.3,
    spread: float = 0.5,
    hits: float = 0.0,
    attainment: float | None = None,
    queued: int = 10,
    evictions: int = 0,
    late: float = 0.0,
    good: float = 0.0,
) -> Observation:
    return Observation(10.0, spread, kv, hits, 0.02, attainment, queued, evictions, late, good)


def pushed(control: Control, observation: Observation, now_s: float = 0.0) -> dict[Knob, float]:
    return {move.knob: move.after - move.before for move in control.look(observation, now_s)}


@pytest.mark.parametrize(
    ("observation", "up", "down"),
    [
        (seen(kv=0.95), {Knob.RESERVE_QUANTILE}, {Knob.BATCH_CAP, Knob.TOKEN_BUDGET, Knob.LOOKAHEAD}),
        (seen(evictions=1), {Knob.RESERVE_QUANTILE}, {Knob.BATCH_CAP, Knob.TOKEN_BUDGET, Knob.LOOKAHEAD}),
        (seen(spread=1.2), set(), {Knob.AGEING}),
        (seen(hits=0.8), {Knob.LOOKAHEAD, Knob.PREFIX_WEIGHT}, set()),
        (seen(attainment=0.7), {Knob.EARLY_REFUSAL}, {Knob.BATCH_SHARE}),
        (seen(attainment=0.7, queued=0), set(), set()),
        (seen(attainment=0.95), set(), set()),
        (seen(late=0.1), {Knob.ADMISSION}, set()),
        (seen(late=0.04), set(), set()),
        (seen(), set(), set()),
    ],
)
def test_each_rule_pushes_its_knobs(observation: Observation, up: set[Knob], down: set[Knob]) -> None:
    moves = pushed(Control(ControlMode.ACTING), observation)
    assert {knob for knob, by in moves.items() if by > 0} == up
    assert {knob for knob, by in moves.items() if by < 0} == down


def test_the_forecast_counts_once_under_overload_and_half_where_most_is_served_well_within_its_target() -> (
    None
):
    control = Control(ControlMode.ACTING)

    def strictness(at_s: float, late: float, good: float) -> float:
        control.look(seen(late=late, good=good), at_s)
        return control.values[Knob.ADMISSION]

    assert strictness(0.0, late=0.0, good=1.0) == 0.0, "nobody is expected to be late"
    assert strictness(2.0, late=0.4, good=0.2) == FIRM
    assert strictness(30.0, late=1.0, good=0.9) == FIRM, "what ends now came before those that are late"
    assert strictness(32.0, late=1.0, good=0.95) == LENIENT, "a forecast that expects too much"
    assert strictness(34.0, late=0.4, good=0.3) == LENIENT, "it has just turned"
    assert strictness(32.0 + ADMISSION_REVERSAL_S, late=0.4, good=0.3) == FIRM, "and turns within seconds"
    assert strictness(80.0, late=0.0, good=0.8) == LENIENT, "the load has fallen"
    assert strictness(82.0 + BURSTS_S, late=0.0, good=0.8) == 0.0


def test_a_bound_holds_a_knob_down_and_leaves_it_where_the_rules_want_it() -> None:
    control = Control(ControlMode.ACTING)
    control.bound(Knob.BATCH_SHARE, 0.1)
    assert control.values[Knob.BATCH_SHARE] == 0.1
    assert Knob.BATCH_SHARE not in pushed(control, seen(attainment=0.7)), "it stands where it stood"
    control.bound(Knob.BATCH_SHARE, 0.8)
    [move] = [each for each in control.look(seen(attainment=0.7), 5.0) if each.knob is Knob.BATCH_SHARE]
    assert (move.before, move.after) == (0.8, pytest.approx(0.7))
    control.bound(Knob.BATCH_SHARE, 1.0)
    assert control.values[Knob.BATCH_SHARE] == pytest.approx(0.7)


def test_at_most_one_knob_turns_back_in_a_minute() -> None:
    control = Control(ControlMode.ACTING)
    control.look(seen(kv=0.99, spread=2.0), 0.0)
    moved = {Knob.BATCH_CAP, Knob.TOKEN_BUDGET, Knob.LOOKAHEAD, Knob.RESERVE_QUANTILE, Knob.AGEING}
    assert {move.knob for move in control.moves} == moved
    assert control.look(seen(), REVERSAL_S) == [], "who only returns to rest waits a minute more"
    back = [control.look(seen(), REVERSAL_S * minute) for minute in range(2, 7)]
    assert [len(moves) for moves in back] == [1, 1, 1, 1, 1]
    assert {move.knob for moves in back for move in moves} == moved


def test_memory_goes_before_concurrency() -> None:
    control = Control(ControlMode.ACTING)
    assert pushed(control, seen(kv=0.95, hits=0.9))[Knob.LOOKAHEAD] < 0
    [move] = [each for each in control.moves if each.knob is Knob.LOOKAHEAD]
    assert move.reason == "KV nearly full (0.95)"


def test_off_does_nothing_and_advice_is_the_same_without_being_made() -> None:
    off, advice, acting = Control(), Control(ControlMode.ADVICE), Control(ControlMode.ACTING)
    assert off.look(seen(kv=0.99), 0.0) == []
    advised, made = advice.look(seen(kv=0.99), 0.0), acting.look(seen(kv=0.99), 0.0)
    assert advised
    assert [(each.knob, each.after, each.reason) for each in advised] == [
        (each.knob, each.after, each.reason) for each in made
    ]
    assert not any(each.is_made for each in advised)
    assert all(each.is_made for each in made)


def test_a_rule_ends_below_another_threshold_than_it_begins_at() -> None:
    control = Control(ControlMode.ACTING)
    assert not pushed(control, seen(kv=0.85), 0.0), "it has not begun"
    assert pushed(control, seen(kv=0.93), 5.0)[Knob.BATCH_CAP] < 0
    assert pushed(control, seen(kv=0.85), 10.0)[Knob.BATCH_CAP] < 0, "it has not ended"
    assert Knob.BATCH_CAP not in pushed(control, seen(kv=0.5), 4.9 + 2 * REVERSAL_S), "it turns back later"
    assert pushed(control, seen(kv=0.5), 10.0 + 2 * REVERSAL_S)[Knob.BATCH_CAP] > 0


def test_knobs_come_to_rest_again() -> None:
    control = Control(ControlMode.ACTING)
    for tick in range(20):
        control.look(seen(kv=0.99, spread=2.0, attainment=0.1), tick * EVERY_S)
    assert control.values[Knob.BATCH_CAP] == DEFAULT_BOUNDS[Knob.BATCH_CAP].lowest
    for tick in range(20, 200):
        control.look(seen(), tick * EVERY_S)
    assert control.values == {knob: bounds.rest for knob, bounds in DEFAULT_BOUNDS.items()}


def test_bounds_that_make_no_sense_are_refused() -> None:
    for bounds in ((1.0, 0.5, 2.0, 0.1), (0.0, 1.0, 0.5, 0.1), (0.0, 0.5, 1.0, 0.0)):
        with pytest.raises(ValueError, match="lowest <= rest <= highest"):
            Bounds(*bounds)


traffic = st.builds(
    seen, kv=st.floats(0, 1), spread=st.floats(0, 3), hits=st.floats(0, 1),
    attainment=st.none() | st.floats(0, 1), queued=st.integers(0, 100), evictions=st.integers(0, 2),
    late=st.floats(0, 1), good=st.floats(0, 1),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(traffic, st.floats(0.1, 40.0)), max_size=60))
def test_whatever_the_traffic_knobs_stay_within_bounds_and_turn_once_a_minute(
    looks: list[tuple[Observation, float]],
) -> None:
    acting, advice = Control(ControlMode.ACTING), Control(ControlMode.ADVICE)
    now_s = 0.0
    for observation, gap_s in looks:
        now_s += gap_s
        moved = acting.look(observation, now_s)
        assert len({move.knob for move in moved}) == len(moved), "one move of a knob at a time"
        advice.look(observation, now_s)
    assert advice.values == acting.values
    turned: dict[Knob, tuple[float, bool]] = {}
    reversed_s = -REVERSAL_S
    for move in acting.moves:
        bounds = DEFAULT_BOUNDS[move.knob]
        assert bounds.lowest <= move.after <= bounds.highest
        assert 0 < abs(move.after - move.before) <= bounds.step + 1e-12
        assert move.reason
        last = turned.get(move.knob)
        goes_up = move.after > move.before
        if move.knob is Knob.ADMISSION:
            assert last is None or last[1] == goes_up or move.at_s - last[0] >= ADMISSION_REVERSAL_S
        elif last is not None and last[1] != goes_up:
            assert move.at_s - max(last[0], reversed_s) >= REVERSAL_S
            reversed_s = move.at_s
        turned[move.knob] = (move.at_s, goes_up)
