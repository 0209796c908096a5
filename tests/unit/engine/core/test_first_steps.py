"""An engine times some steps at its start, so that its step-time model begins with measurements."""

from __future__ import annotations

import pytest

from engine.core.core import EngineConfig
from engine.core.first_steps import MOST_S, largest_step, prompt_lengths, timed_steps
from engine.core.model_runner import Sampled, StepWork
from engine.messages import StepTime
from engine.step_time.model import PRIOR, predict_step_s
from engine.virtual.replica import VirtualClock, VirtualRunner, VirtualTexts

SHAPES = ((1, 25, 1), (16, 16 * 200, 16), (384, 16 * 300, 16))
"""One decode, decodes of all places, their prompts."""


@pytest.mark.parametrize(
    "truth",
    [
        StepTime(5e-4, 20e-6, 6e-9, 30e-6, 0, 0.0),
        StepTime(25e-3, 1e-6, 1e-9, 1e-6, 0, 0.0),
        StepTime(1e-4, 2e-3, 2e-9, 1e-4, 0, 0.0),
        StepTime(1e-4, 2e-4, 2e-9, 1e-4, 0, 0.0, graph_sizes=(7, 32), mixed_sizes=(100, 500)),
    ],
    ids=["small", "base only", "by the token", "padded"],
)
def test_what_was_timed_predicts_other_steps_of_this_machine(truth: StepTime) -> None:
    clock = VirtualClock()
    runner = VirtualRunner(clock, step_time=truth)
    found = timed_steps(runner, VirtualTexts(), config(), clock)
    found.pad_to(runner)
    for shape in SHAPES:
        assert found.predict(*shape) == pytest.approx(predict_step_s(truth, *shape), rel=0.25)
    assert found.samples >= 8
    assert found.to_message().relative_error < 0.05
    found.observe(1, 25, 1, 10 * predict_step_s(truth, 1, 25, 1))
    assert predict_step_s(found.mean(), 1, 25, 1) < 4 * predict_step_s(truth, 1, 25, 1), "one slow step"


def test_a_ceiling_is_measured_without_sleeping_for_it() -> None:
    clock = VirtualClock()
    found = timed_steps(VirtualRunner(clock, step_time=PRIOR), VirtualTexts(), config(ceiling=300.0), clock)
    assert found.predict(16, 16 * 25, 16) == pytest.approx(16 / 300, rel=0.1)
    assert clock() < MOST_S


def test_a_slow_engine_times_no_more_than_it_has_begun() -> None:
    clock = VirtualClock()
    slow = StepTime(2.0, 1e-3, 1e-9, 1e-3, 0, 0.0)
    found = timed_steps(VirtualRunner(clock, step_time=slow), VirtualTexts(), config(), clock)
    assert found.samples == 4
    assert clock() == pytest.approx(4 * 2.0, rel=0.1)
    assert found.predict(1, 25, 1) == pytest.approx(2.0, rel=0.1)


def test_it_times_no_more_sequences_than_the_memory_holds() -> None:
    clock = VirtualClock()
    runner = VirtualRunner(clock, num_blocks=4, block_tokens=4, context_tokens=12)
    assert timed_steps(runner, VirtualTexts(), config(), clock).samples == 4


class CountingRunner(VirtualRunner):
    def launch(self, work: StepWork) -> list[Sampled | None]:
        self.shapes = [*getattr(self, "shapes", []), list(work.num_tokens)]
        return super().launch(work)


@pytest.mark.parametrize(
    ("sequences", "tokens", "lengths"),
    [(4, 64, [61, 1, 1, 1]), (4, 400, [99, 99, 99, 99]), (3, 150, [99, 50, 1]), (8, 8, [1] * 8)],
)
def test_the_largest_step_has_all_sequences_and_tokens_at_once(
    sequences: int, tokens: int, lengths: list[int]
) -> None:
    runner = CountingRunner(VirtualClock(), num_blocks=110, block_tokens=4, context_tokens=100)
    assert prompt_lengths(sequences, tokens, 100) == lengths
    assert largest_step(runner, VirtualTexts(), lengths)
    assert runner.shapes == [lengths]


def config(ceiling: float = 0.0) -> EngineConfig:
    return EngineConfig(max_sequences=16, max_batched_tokens=512, max_tokens_per_s=ceiling)
