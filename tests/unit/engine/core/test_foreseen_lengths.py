"""An engine tells what it foresees of an answer with the token after which the model's state was read."""

from __future__ import annotations

from engine.core.core import EngineConfig, EngineCore
from engine.core.model_runner import StepWork
from engine.forecast.length.probe import RANGES, range_of
from engine.messages import Delta, SamplingParams
from engine.virtual.replica import VirtualClock, VirtualRunner, VirtualStep, VirtualTexts
from tests.support.builders import submit

LENGTH = 40
ANSWERS_TO_TRUST = 12


class ReadingRunner(VirtualRunner):
    """Says after each prompt, and again after 20 more tokens, how many are to come."""

    def launch(self, work: StepWork) -> VirtualStep:
        launched = super().launch(work)
        for row, position, count, choice in zip(
            work.rows, work.positions, work.num_tokens, launched.sampled, strict=True
        ):
            out = position + count - self._rows[row].num_prompt_tokens
            if choice is not None and out in (0, 20):
                right = range_of(LENGTH - out)
                choice.remaining_logits = [9.0 if index == right else 0.0 for index in range(RANGES)]
        return launched


def make_core() -> tuple[EngineCore, ReadingRunner]:
    clock = VirtualClock()
    runner = ReadingRunner(clock, num_blocks=64, block_tokens=16, context_tokens=512)
    return EngineCore(runner, VirtualTexts(), EngineConfig(max_sequences=4), clock), runner


def answer(core: EngineCore, runner: ReadingRunner, number: int, *, ignore_eos: bool = False) -> list[Delta]:
    runner.set_length(f"s{number}", LENGTH)
    sampling = SamplingParams(ignore_eos=ignore_eos)
    core.submit(submit(f"s{number}", max_tokens=200, sampling=sampling, predicted_output_tokens=150), "g")
    deltas: list[Delta] = []
    while core.has_work():
        deltas += [delta for each in core.step().deltas.values() for delta in each]
    return deltas


def test_it_is_told_once_a_reading_and_only_when_the_gate_trusts_it() -> None:
    core, runner = make_core()
    core.lengths.took_over(300)
    for number in range(ANSWERS_TO_TRUST):
        assert not any(delta.foreseen_tokens for delta in answer(core, runner, number))
    told = {
        delta.first_index: delta.foreseen_tokens
        for delta in answer(core, runner, 100)
        if delta.foreseen_tokens is not None
    }
    assert set(told) == {0, 20}
    for median, high in told.values():
        assert 0.75 * LENGTH <= median <= 1.25 * LENGTH
        assert median <= high <= 200
    snapshot = core.snapshot("e")
    assert snapshot.length_probe.is_used
    assert snapshot.length_probe.answers == ANSWERS_TO_TRUST + 1


def test_of_an_answer_that_goes_on_to_its_maximum_nothing_is_foreseen() -> None:
    core, runner = make_core()
    for number in range(ANSWERS_TO_TRUST + 1):
        answer(core, runner, number)
    assert not any(delta.foreseen_tokens for delta in answer(core, runner, 100, ignore_eos=True))
