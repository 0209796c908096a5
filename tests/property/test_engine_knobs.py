"""Knobs that turn at random between steps, as when learned tables switch, break no invariant of the engine.

Histories as in `test_engine_histories.py`: answers stay exact, steps within their bounds, nothing is left
over and every sequence ends. And the simulator that takes many steps at once sees each turn when the one that
takes them singly does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import EngineKnobs
from ops.simulate.pool import SimulatedPool, busy
from ops.simulate.predictions import PREDICTIONS
from tests.property.test_engine_histories import History, check_answers
from tests.property.test_simulate_runs import machine, outcome, requests


def random_knobs(rng: random.Random) -> EngineKnobs:
    """As far as a table's actions go."""
    return EngineKnobs(
        token_share=rng.choice((0.25, 0.5, 1.0)),
        slot_share=rng.choice((0.25, 0.5, 0.75, 1.0)),
        partial_prefills=rng.choice((None, 1, 2, 8)),
        reserve_permille=rng.choice((None, 0, 250, 1000)),
    )


@dataclass
class TurningHistory(History):
    """One in which knobs turn."""

    turns: int = 0

    def disturb(self) -> None:
        super().disturb()
        if self.rng.random() < 0.25:
            self.turn(random_knobs(self.rng))

    def turn(self, knobs: EngineKnobs) -> None:
        core, table = self.replica.core, self.replica.core.table
        before = (
            [each.sequence_id for each in table.running],
            list(table.paused),
            sorted(entry.entry_id for entry in table.waiting.entries()),
            table.counters.values(),
            table.standings.values(),
            table.preemptions,
        )
        core.set_knobs(knobs)
        core.check()
        after = (
            [each.sequence_id for each in table.running],
            list(table.paused),
            sorted(entry.entry_id for entry in table.waiting.entries()),
            table.counters.values(),
            table.standings.values(),
            table.preemptions,
        )
        assert after == before, "a turn by itself moves, evicts and charges nothing"
        self.turns += 1

    def step(self) -> None:
        table = self.replica.core.table
        assert (
            table.max_sequences
            <= table.max_batched_tokens
            <= max(self.config.max_batched_tokens, self.config.max_sequences)
        )
        super().step()


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), policy=st.sampled_from(["learned", "learned", "vtc", "fcfs", "mlfq"]))
def test_histories_in_which_knobs_turn(seed: int, policy: str) -> None:
    history = TurningHistory(seed, policy)
    history.run()
    assert history.turns > 10
    assert history.finishes.keys() == history.submits.keys(), "every one ends"
    table = history.replica.core.table
    assert table.pool.num_referenced == 0
    assert history.service == history.accounted
    check_answers(history)


def turned_run(seed: int, policy: str, *, runs: bool) -> SimulatedPool:
    """A simulated pool whose knobs turn ten times a second, the same for the same seed."""
    rng = random.Random(seed)
    pool = SimulatedPool(
        policy, machine(60, 6), replicas=1 + seed % 2, runs=runs, predictions=PREDICTIONS["exact"]()
    )
    for turn in range(60):
        pool.at(0.1 * turn, partial(pool.set_engine_knobs, random_knobs(rng)))
    pool.run(requests(seed, gap_s=0.05, tiers=2))
    for member in pool.members:
        member.engine.table.check()
    return pool


def test_runs_of_steps_end_where_a_knob_turns() -> None:
    in_runs = 0
    for seed in range(10):
        for policy in ("learned", "fcfs"):
            fast, plain = (turned_run(seed, policy, runs=runs) for runs in (True, False))
            assert outcome(fast) == outcome(plain)
            in_runs += busy(fast).steps_in_runs
    assert in_runs > 100, "hardly any step was taken in a run"
    still = SimulatedPool("learned", machine(60, 6), predictions=PREDICTIONS["exact"]())
    still.run(requests(0, gap_s=0.05, tiers=2))
    assert outcome(still)["records"] != outcome(turned_run(0, "learned", runs=True))["records"]
