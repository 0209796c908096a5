"""Steps that do not fit the device's memory: they shrink, fail no sequence and grow again."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import pytest

from engine.core.core import EngineConfig, EngineCore
from engine.core.model_runner import DeviceLost, OutOfDeviceMemory, Sampled, SequenceSlice
from engine.core.step_budget import RECOVERS_AFTER_STEPS, StepBudget
from engine.messages import EngineKnobs
from engine.virtual.replica import VirtualClock, VirtualReplica, VirtualRunner, VirtualTexts
from tests.unit.engine.core.test_core import make_submit, tokens


class TightRunner(VirtualRunner):
    """A device with memory for steps of `most_tokens`."""

    most_tokens = 1 << 20
    lost = False

    def execute(self, slices: SequenceOf[SequenceSlice]) -> list[Sampled | None]:
        if self.lost:
            raise DeviceLost("CUDA error: device-side assert triggered")
        if sum(piece.num_tokens for piece in slices) > self.most_tokens:
            raise OutOfDeviceMemory("CUDA out of memory.")
        return super().execute(slices)


def tight_core(policy: str = "vtc", *, most_tokens: int) -> tuple[EngineCore, TightRunner]:
    clock = VirtualClock()
    runner = TightRunner(clock, num_blocks=64, block_tokens=4, audit=True)
    runner.most_tokens = most_tokens
    config = EngineConfig(policy=policy, max_batched_tokens=32, max_sequences=4)
    return EngineCore(runner, VirtualTexts(), config, clock), runner


@pytest.mark.parametrize("policy", ["vtc", "fcfs", "hybrid"])
def test_out_of_memory_shrinks_the_steps_and_every_answer_is_as_without(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    submits = [make_submit(name, tenant_id=name, prompt_token_ids=[3] * 20) for name in "abcd"]
    plain = VirtualReplica(
        EngineConfig(policy=policy, max_batched_tokens=32, max_sequences=4),
        num_blocks=64, block_tokens=4, audit=True,
    )  # fmt: skip
    core, _ = tight_core(policy, most_tokens=9)
    answers: list[list[list[int]]] = [[], []]
    for index, each in enumerate((plain.core, core)):
        deltas = []
        for submit in submits:
            assert each.submit(submit, "g") is None
        while each.has_work():
            deltas += each.step().deltas.get("g", [])
            each.check()
        for submit in submits:
            mine = [delta for delta in deltas if delta.sequence_id == submit.sequence_id]
            assert mine[-1].outcome is not None
            assert mine[-1].outcome.finish == "length"
            answers[index].append(tokens(mine))
        assert each.counters.values() == plain.core.counters.values(), "what was not computed is not charged"
    assert answers[0] == answers[1]
    assert core.table.max_batched_tokens == 8
    assert "step 1 of 32 tokens does not fit the device's memory (CUDA out of memory.)" in caplog.text
    assert "at most 8 tokens now" in caplog.text


def test_a_step_that_cannot_be_smaller_fails_its_sequences_and_the_engine_goes_on() -> None:
    core, runner = tight_core("fcfs", most_tokens=32)
    for name in "ab":
        core.submit(make_submit(name, max_tokens=9), "g")
    core.step()
    runner.most_tokens = 1
    outcomes = {delta.sequence_id: delta.outcome for delta in core.step().deltas["g"] if delta.outcome}
    assert {name: outcome.finish for name, outcome in outcomes.items()} == {"a": "failed", "b": "failed"}
    core.check()
    assert core.device_lost is None


def test_knobs_do_not_raise_what_did_not_fit_and_the_steps_grow_again() -> None:
    core, _ = tight_core(most_tokens=8)
    core.submit(make_submit(prompt_token_ids=[1] * 20), "g")
    core.step()
    core.step()
    assert core.table.max_batched_tokens == 5, "half of the prompt in two steps: 20, 10"
    core.set_knobs(EngineKnobs(token_share=1.0))
    assert core.table.max_batched_tokens == 5
    for _ in range(RECOVERS_AFTER_STEPS - 1):
        core._budget.computed()
    core.step()
    assert core.table.max_batched_tokens == 10


def test_the_bound_doubles_up_to_the_configured_one_and_starts_counting_anew() -> None:
    budget = StepBudget(31)
    assert budget.shrink(31, least=1)
    for steps, tokens_then in ((RECOVERS_AFTER_STEPS - 1, 15), (1, 30), (5 * RECOVERS_AFTER_STEPS, 31)):
        for _ in range(steps):
            budget.computed()
        assert budget.tokens == tokens_then
    assert budget.shrink(30, least=20)
    assert budget.tokens == 20
    assert not budget.shrink(20, least=20)
    assert not budget.shrink(1, least=0)


def test_a_lost_device_is_known_after_the_step_whose_sequences_it_failed() -> None:
    core, runner = tight_core(most_tokens=32)
    core.submit(make_submit(), "g")
    core.step()
    runner.lost = True
    (delta,) = core.step().deltas["g"]
    assert delta.outcome is not None
    assert delta.outcome.finish == "failed"
    assert isinstance(core.device_lost, DeviceLost)
