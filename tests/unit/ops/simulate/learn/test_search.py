"""When a change of a table is kept, and a judgement is a win."""

from __future__ import annotations

import pytest

from gateway.flow.learned.actions import HYBRID, Actions
from gateway.flow.learned.macro_state import NUM_STATES
from ops.simulate.learn.judge import HeldOutRuns, judged
from ops.simulate.learn.objective import ServedSum
from ops.simulate.learn.search import LEAST_GAIN, TableSearch, changed, gain_of, is_kept
from ops.simulate.learn.segments import Piece, split
from ops.simulate.learn.trial import NO_LOOKS, LearningTrial, TrialRun, Trials
from tests.support.bursty_traffic import SETUP, bursty
from tests.support.learned_tables import learned_table

UNITS = [LearningTrial(Piece(number, f"piece {number}", ()), seed) for number in (0, 1) for seed in (7, 8)]


def run_of(value: float) -> TrialRun:
    return TrialRun(ServedSum(1, 0.0, 0.0, 0.0, 0.0), value, NO_LOOKS, tuple(map(float, NO_LOOKS)))


def runs_of(*values: float) -> dict[LearningTrial, TrialRun]:
    return {unit: run_of(value) for unit, value in zip(UNITS, values, strict=False)}


def test_a_gain_is_the_mean_of_all_units_and_its_spread_that_of_the_seeds() -> None:
    best, runs = runs_of(1.0, 1.0, 1.0, 1.0), runs_of(0.6, 0.8, 0.8, 0.6)
    # Seed 7 gains 0.4 and 0.2, seed 8 0.2 and 0.4: alike.
    assert gain_of(UNITS, best, runs) == pytest.approx((0.3, 0.0))
    runs = runs_of(0.6, 1.0, 0.6, 1.0)
    # Seed 7 gains 0.4 twice, seed 8 nothing.
    assert gain_of(UNITS, best, runs) == pytest.approx((0.2, 0.4 / 2**0.5))


def test_where_its_states_were_not_seen_a_change_gains_nothing() -> None:
    best = runs_of(1.0, 1.0, 1.0, 1.0)
    assert gain_of(UNITS, best, runs_of(0.6, 0.6)) == pytest.approx((0.2, 0.0))


@pytest.mark.parametrize(
    ("gain", "spread", "kept"),
    [
        (0.1, 0.05, True),
        (0.05, 0.05, False),
        (0.05, 0.1, False),
        (LEAST_GAIN, 0.0, False),
        (-0.1, 0.0, False),
    ],
)
def test_a_change_is_kept_only_beyond_the_spread_of_the_seeds(gain: float, spread: float, kept: bool) -> None:
    assert is_kept(gain, spread) is kept


def test_one_value_changes_in_the_named_states_alone() -> None:
    table = learned_table(dict.fromkeys(range(NUM_STATES), HYBRID))
    found = changed(table, (3, 4), "reserve_permille", 250)
    assert {entry.state for entry in found.entries if entry.actions != HYBRID} == {3, 4}
    assert found.by_state()[3].actions == Actions(reserve_permille=250)  # type: ignore[union-attr]
    assert changed(found, (3, 4), "reserve_permille", 500) == table


@pytest.mark.parametrize(
    ("table", "other", "wins", "words"),
    [
        ((1.0, 1.0, 1.0), (1.3, 1.2, 1.4), True, "wins by more than the seeds differ"),
        ((1.0, 1.0, 1.0), (1.3, 0.9, 1.1), False, "wins by less than the seeds differ, which may be chance"),
        ((1.0, 1.0, 1.0), (0.9, 0.9, 0.9), False, "does not win"),
        ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), False, "does not win"),
    ],
)
def test_a_table_wins_only_by_more_than_the_seeds_differ(
    table: tuple[float, ...], other: tuple[float, ...], wins: bool, words: str
) -> None:
    ours, theirs = (
        HeldOutRuns({seed: (run_of(value),) for seed, value in enumerate(each)}) for each in (table, other)
    )
    found = judged("hybrid", ours, theirs)
    assert found.wins is wins
    assert found.words().endswith(f"the table {words}")


def test_a_search_ends_before_it_would_exceed_its_budget() -> None:
    piece = split("bursty", bursty()).learnt_from[1]
    units = [LearningTrial(piece, seed) for seed in (0, 1)]
    table = learned_table(dict.fromkeys(range(NUM_STATES), HYBRID))
    told: list[tuple[int, int]] = []
    trials = Trials(SETUP, 5 * len(piece) + 10, lambda done, of: told.append((done, of)))
    search = TableSearch(trials, units, table, ["slots"], keep=10)
    # Two runs under hybrid, two of the table that it begins with, one candidate.
    assert search.run() == table
    assert (search.is_spent, search.candidates, trials.runs, trials.simulated) == (True, 1, 5, 5 * len(piece))
    assert told[-1] == (5 * len(piece), 5 * len(piece) + 10)
