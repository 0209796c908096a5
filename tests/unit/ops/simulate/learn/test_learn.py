"""Whole searches on small traffic with bursts."""

from __future__ import annotations

import pytest

from ops.simulate.learn.judge import judged, served_held_out
from ops.simulate.learn.learn import learn
from ops.simulate.learn.trial import Trials
from tests.support.bursty_traffic import SETUP, bursty, shuffled

pytestmark = pytest.mark.long

BUDGET = 3_600


def test_a_table_of_shuffled_arrivals_is_not_taken_over() -> None:
    """Neither where it was fitted, nor in place of one that was fitted on the bursts as they came."""
    of_shuffled = learn("shuffled", shuffled(bursty()), SETUP, budget=BUDGET)
    of_bursts = learn("bursty", bursty(), SETUP, budget=BUDGET)
    assert (of_shuffled.wins, of_bursts.wins) == (False, True)
    trials = Trials(SETUP, 1 << 40)
    ours, theirs = (
        served_held_out(trials, of_bursts.held_out, (1, 2, 3), each.table)
        for each in (of_shuffled, of_bursts)
    )
    assert not judged("the table of the bursts", ours, theirs).wins


def test_another_seed_draws_other_arrivals_and_the_same_seed_the_same() -> None:
    once, again, other = (learn("bursty", bursty(), SETUP, budget=BUDGET, seed=seed) for seed in (1, 1, 2))
    assert once.table.encode() == again.table.encode()
    assert once.hybrid.means() == again.hybrid.means() != other.hybrid.means()
    assert (once.table.seed, other.table.seed) == (1, 2)
