"""Admission with a memory reserve."""

from __future__ import annotations

from engine.scheduling.admit.reserve import PredictedReserve, prompt_only
from tests.support.scheduling_states import make_batch, make_sequence, start


def test_prompt_only_sets_nothing_aside() -> None:
    batch = make_batch([start(make_sequence("r"), 4)], block_tokens=4)
    assert prompt_only().blocks_wanted(make_sequence("s", prompt=9), batch) == 3


def test_the_reserve_is_a_part_of_the_predicted_remainder() -> None:
    admit = PredictedReserve(500)
    batch = make_batch([], block_tokens=1)
    assert admit.blocks_wanted(make_sequence("s", predicted=20), batch) == 4 + 10
    assert admit.blocks_wanted(make_sequence("s", predicted=20, output=8), batch) == 4 + 8 + 6
    assert admit.blocks_wanted(make_sequence("s", predicted=20, output=30), batch) == 4 + 30


def test_no_more_is_wanted_than_the_sequence_can_ever_use() -> None:
    short = make_sequence("s", prompt=4, predicted=40, max_tokens=5)
    assert (
        PredictedReserve(1000).blocks_wanted(short, make_batch([], block_tokens=4)) == 2
    )  # 4 + 5 - 1 tokens


def test_blocks_that_are_held_are_not_wanted_again() -> None:
    running = start(make_sequence("r", prompt=8, computed=8, output=1, predicted=8), 4)
    batch = make_batch([running, running], block_tokens=4)
    assert len(running.block_table) == 3
    # Two running ones miss a block each (9 + 7 tokens), and the candidate wants two.
    candidate = make_sequence("s", prompt=4, predicted=4)
    assert PredictedReserve(1000).blocks_wanted(candidate, batch) == 2 + 2
