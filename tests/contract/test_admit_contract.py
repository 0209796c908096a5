"""Contract of `engine.scheduling.admit.base.Admit`, for every admission.

Parametrised over ADMITS: a new admission is held to it by being named there.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.scheduling.admit.base import Admit, Batch
from engine.scheduling.batch_or_wait.wait_table import TableAction
from engine.scheduling.claims import SAFE
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import ADMITS
from engine.sequence import Sequence
from engine.sizes import blocks_for
from tests.support.scheduling_states import make_batch, make_sequence, random_sequence, start

Make = Callable[[], Admit]


class WaitsForEight:
    """A table that would wait a second at a time for eight."""

    long_tokens = 300
    longest_wait_s = 2.5

    def decide(
        self,
        *,
        rate_per_s: float,
        num_waiting: int,
        oldest_wait_s: float,
        has_long: bool,
        remaining_tokens: int,
        kv_pressure: float,
    ) -> TableAction:
        assert rate_per_s >= 0
        assert oldest_wait_s >= 0
        assert remaining_tokens >= 0
        assert 0 <= kv_pressure <= 1
        return TableAction(0.0, num_waiting) if num_waiting >= 8 else TableAction(1.0, 0)


OPTIONS = PolicyOptions(batch_or_wait_table=WaitsForEight())


@pytest.fixture(params=sorted(ADMITS))
def make(request: pytest.FixtureRequest) -> Make:
    return lambda: ADMITS[request.param](OPTIONS)


def let_in(admit: Admit, candidate: Sequence, batch: Batch, running: list[Sequence]) -> None:
    """What the scheduler does when a candidate may start."""
    start(candidate, batch.block_tokens)
    candidate.computed_tokens = 0
    running.append(candidate)
    batch.free_blocks -= len(candidate.block_table)
    batch.num_waiting -= 1
    batch.admitted_now += 1
    admit.admitted(candidate, batch)


@pytest.mark.parametrize("seed", range(6))
def test_with_nothing_running_a_candidate_joins_after_the_longest_wait(make: Make, seed: int) -> None:
    """However it is asked in between: at the times that it names itself, and at others."""
    rng = random.Random(seed)
    admit = make()
    held = 0
    now_s = 0.0
    for number in range(30):
        candidate = random_sequence(rng, f"s{number}", now_s=now_s)
        candidate.submitted_s = now_s
        until_s = now_s + admit.longest_wait_s
        while (hold := admit.joins(candidate, make_batch([], now_s=now_s))) is not None:
            held += 1
            assert now_s < until_s, "it holds longer than it declares"
            assert hold.until_s is not None, "nobody would ask again"
            assert now_s < hold.until_s <= until_s + 1e-9
            assert hold.rule
            now_s = rng.choice((hold.until_s, now_s + (hold.until_s - now_s) * rng.random()))
            admit.stepped()
        running: list[Sequence] = []
        let_in(admit, candidate, make_batch(running, now_s=now_s), running)
        admit.stepped()
        now_s += rng.random()
    assert (held > 0) == (admit.longest_wait_s > 0)


@pytest.mark.parametrize("seed", range(10))
def test_of_an_empty_pool_a_candidate_wants_no_more_than_it_can_ever_need(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    admit = make()
    for _ in range(rng.randint(0, 3)):
        admit.preempted()
        admit.stepped()
    for number in range(50):
        candidate = random_sequence(rng, f"s{number}")
        block_tokens = rng.choice((1, 4, 16))
        wanted = admit.blocks_wanted(candidate, make_batch([], block_tokens=block_tokens))
        most = max(candidate.most_tokens, candidate.total_tokens)
        assert wanted <= blocks_for(most, block_tokens)


@pytest.mark.parametrize("seed", range(6))
def test_what_it_remembers_within_a_step_is_what_it_would_find_anew(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    admit = make()
    asked = 0
    running: list[Sequence] = []
    for step in range(6):
        batch = make_batch(running, num_waiting=20, now_s=float(step))
        for number in range(rng.randint(1, 12)):
            candidate = random_sequence(rng, f"{step}.{number}")
            fresh = make_batch(running, num_waiting=batch.num_waiting, now_s=float(step))
            assert admit.blocks_wanted(candidate, batch) == admit.blocks_wanted(candidate, fresh)
            assert (admit.joins(candidate, batch) is None) == (admit.joins(candidate, fresh) is None)
            asked += len(running) > 1
            if admit.joins(candidate, batch) is None:
                let_in(admit, candidate, batch, running)
        admit.stepped()
        running = [sequence for sequence in running if rng.random() < 0.8]
    assert asked > 5


@pytest.mark.parametrize("seed", range(10))
def test_only_running_ones_of_the_candidates_tier_are_suspended(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    admit = make()
    running = [
        start(make_sequence(f"r{number}", prompt=2000, output=3, predicted=400, max_tokens=500, tier=1))
        for number in range(rng.randint(1, 10))
    ]
    batch = make_batch(running, now_s=100.0)
    candidate = make_sequence("s", prompt=4, predicted=4, tier=rng.choice((0, 1)))
    suspended = admit.suspends(candidate, batch)
    assert all(any(each is one for one in running) for each in suspended)
    assert all(each.tier == candidate.tier for each in suspended)
    assert len(set(suspended)) == len(suspended)
    if suspended:
        assert admit.joins(candidate, make_batch([], now_s=100.0)) is None


def test_asking_twice_gives_the_same_answer(make: Make) -> None:
    rng = random.Random(9)
    admit = make()
    for number in range(20):
        candidate = random_sequence(rng, f"s{number}", now_s=float(number))
        batch = make_batch([], now_s=float(number))
        assert admit.joins(candidate, batch) == admit.joins(candidate, batch)
        assert admit.blocks_wanted(candidate, batch) == admit.blocks_wanted(candidate, batch)


def test_what_it_claims_is_known(make: Make) -> None:
    assert make().claims >= SAFE
