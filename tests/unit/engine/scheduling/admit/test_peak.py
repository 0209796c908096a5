"""Peak-memory admission against a step-by-step account."""

from __future__ import annotations

import random

import pytest

from engine.scheduling.admit.peak import DECAY_STEPS, PeakAdmit, Peaks, plain_peak
from tests.support.scheduling_states import make_batch, make_sequence, start


def most_at_once(needs: list[tuple[int, int]]) -> int:
    """Each grows by a token a step; one with no more to come is gone after that step."""
    alive = list(needs)
    most = sum(used for _, used in alive)
    while alive:
        most = max(most, sum(used for _, used in alive))
        alive = [(remaining - 1, used + 1) for remaining, used in alive if remaining > 0]
    return most


@pytest.mark.parametrize("seed", range(30))
def test_the_peak_is_what_a_step_by_step_account_finds(seed: int) -> None:
    rng = random.Random(seed)
    needs = [(rng.randint(0, 30), rng.randint(1, 50)) for _ in range(rng.randint(0, 12))]
    assert plain_peak(needs) == most_at_once(needs)


@pytest.mark.parametrize("seed", range(30))
def test_the_peak_kept_up_to_date_is_the_plain_one(seed: int) -> None:
    rng = random.Random(seed)
    needs = [(rng.randint(0, 9), rng.randint(1, 50)) for _ in range(rng.randint(0, 12))]
    peaks = Peaks(needs)
    for _ in range(20):
        one_more = (rng.randint(0, 9), rng.randint(1, 50))
        assert peaks.with_one_more(*one_more) == plain_peak([*needs, one_more])
        if rng.random() < 0.5:
            needs.append(one_more)
            peaks.insert(*one_more)


def test_the_peak_is_smaller_than_all_that_will_ever_be_used() -> None:
    # The short one is gone (after 2 tokens) long before the long one has grown by 30.
    running = [start(make_sequence("short", prompt=10, predicted=2), 1)]
    batch = make_batch(running, block_tokens=1)
    admit = PeakAdmit(quantile_permille=500)
    long = make_sequence("long", prompt=10, predicted=30)
    assert admit.blocks_wanted(long, batch) == 10 + 30 - 10  # of 10 held, which are free by then
    short = make_sequence("short too", prompt=10, predicted=2)
    assert admit.blocks_wanted(short, batch) == 12 + 12 - 10


def test_in_blocks_the_peak_covers_every_last_one_that_is_nearly_empty() -> None:
    running = [start(make_sequence(f"r{number}", prompt=5, predicted=4), 4) for number in range(3)]
    batch = make_batch(running, block_tokens=4)
    admit = PeakAdmit(quantile_permille=500)
    candidate = make_sequence("s", prompt=5, predicted=4)
    assert admit.blocks_wanted(candidate, batch) == 4 * 3 - 3 * 2  # 9 tokens each


def test_the_quantile_lies_between_median_high_and_maximum() -> None:
    sequence = make_sequence("s", prompt=1, predicted=100, high=180, max_tokens=1001)
    at = {level: PeakAdmit(quantile_permille=level) for level in (500, 700, 900, 950, 1000)}
    remaining = {level: admit.needs([sequence], 1)[0][0] for level, admit in at.items()}
    assert remaining == {500: 100, 700: 140, 900: 180, 950: 590, 1000: 1000}
    sequence.token_ids += [2] * 150
    assert at[500].needs([sequence], 1)[0][0] == 1, "one that outlived its forecast has a token to come"


def test_the_quantile_jumps_once_a_step_and_sinks_back() -> None:
    admit = PeakAdmit(quantile_permille=600, jump_permille=200)
    admit.preempted()
    admit.preempted()
    assert (admit.level_permille, admit.jumps) == (800, 1)
    for _ in range(DECAY_STEPS // 2):
        admit.stepped()
    assert admit.level_permille == 700
    for _ in range(DECAY_STEPS // 2):
        admit.stepped()
    assert admit.level_permille == 600
    for _ in range(10):
        admit.preempted()
        admit.stepped()
    assert 990 <= admit.level_permille <= 1000


def test_headroom_is_kept_beside_others_only() -> None:
    admit = PeakAdmit(headroom_permille=100)
    candidate = make_sequence("s", prompt=16, predicted=1)
    empty = make_batch([], num_blocks=100)
    beside = make_batch([start(make_sequence("r", prompt=16, predicted=1))], num_blocks=100)
    plain = PeakAdmit()
    assert admit.blocks_wanted(candidate, empty) == plain.blocks_wanted(candidate, empty)
    beside.memo.clear()
    assert admit.blocks_wanted(candidate, beside) == 10 + plain.blocks_wanted(
        candidate, make_batch(beside.running, num_blocks=100)
    )
