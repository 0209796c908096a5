"""Steps whose batches are padded to their longest part, or keep the rows of ended sequences."""

from __future__ import annotations

from engine.messages import SamplingParams
from engine.virtual.replica import VirtualClock, VirtualRunner
from engine.virtual.step_shapes import PaddedShapes
from tests.support import builders
from tests.support.step_work import SequenceSlice, run_step

SECOND_A_TOKEN = builders.step_time(per_token_s=1.0)


def piece(name: str, position: int, num_tokens: int) -> SequenceSlice:
    total = position + num_tokens
    return SequenceSlice(name, [1] * total, total, position, num_tokens, [0] * 8, True, SamplingParams(), 1)


def test_a_padded_step_takes_the_time_of_its_longest_parts() -> None:
    clock = VirtualClock()
    runner = VirtualRunner(clock, step_time=SECOND_A_TOKEN, shapes=PaddedShapes())
    run_step(runner, [piece("a", 0, 10), piece("b", 0, 30), piece("c", 40, 1), piece("d", 90, 1)])
    assert clock.now_s == 2 * 30 + 2
    assert runner.padded_tokens == 20


def test_padded_decodes_attend_to_the_longest_context() -> None:
    clock = VirtualClock()
    step_time = builders.step_time(per_context_token_s=1.0)
    run_step(
        VirtualRunner(clock, step_time=step_time, shapes=PaddedShapes()),
        [piece("c", 9, 1), piece("d", 99, 1)],
    )
    assert clock.now_s == 200


def test_who_ended_keeps_a_row_until_the_batch_is_over() -> None:
    clock = VirtualClock()
    runner = VirtualRunner(clock, step_time=SECOND_A_TOKEN, shapes=PaddedShapes(keeps_rows=True))
    run_step(runner, [piece("a", 5, 1), piece("b", 5, 1), piece("c", 5, 1)])
    run_step(runner, [piece("a", 6, 1)])
    assert clock.now_s == 3 + 3
    assert runner.padded_tokens == 2
    run_step(runner, [piece("d", 5, 1)])
    assert clock.now_s == 3 + 3 + 1


def test_without_padding_nothing_is_padded() -> None:
    clock = VirtualClock()
    runner = VirtualRunner(clock, step_time=SECOND_A_TOKEN)
    run_step(runner, [piece("a", 0, 10), piece("b", 0, 30)])
    assert clock.now_s == 40
    assert runner.padded_tokens == 0
