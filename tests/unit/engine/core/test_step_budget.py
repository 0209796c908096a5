"""Steps that do not fit the device's memory: they shrink, fail no sequence and grow again."""

from __future__ import annotations

import pytest

from engine.core.core import EngineConfig, EngineCore
from engine.core.model_runner import DeviceLost, OutOfDeviceMemory, Sampled, StepWork
from engine.core.step_budget import RECOVERS_AFTER_STEPS, StepBudget
from engine.messages import EngineKnobs
from engine.virtual.replica import VirtualClock, VirtualRunner, VirtualTexts
from tests.unit.engine.core.test_core import make_submit, tokens


class TightRunner(VirtualRunner):
    """A device with memory for steps of `most_tokens`; at 0 it is lost."""

    most_tokens = 32

    def launch(self, work: StepWork) -> list[Sampled | None]:
        if not self.most_tokens:
            raise DeviceLost("CUDA error: device-side assert triggered")
        if sum(work.num_tokens) > self.most_tokens:
            raise OutOfDeviceMemory("CUDA out of memory.")
        return super().launch(work)


def tight_core(policy: str = "vtc", most_tokens: int = 32) -> tuple[EngineCore, TightRunner]:
    clock = VirtualClock()
    runner = TightRunner(clock, num_blocks=64, block_tokens=4, audit=True)
    runner.most_tokens = most_tokens
    config = EngineConfig(policy=policy, max_batched_tokens=32, max_sequences=4)
    return EngineCore(runner, VirtualTexts(), config, clock), runner


@pytest.mark.parametrize("policy", ["vtc", "fcfs", "hybrid"])
def test_out_of_memory_shrinks_the_steps_and_every_answer_is_as_without(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[dict[str, list[int]]] = []
    charged = []
    for most_tokens in (32, 9):
        core, _ = tight_core(policy, most_tokens)
        for name in "abcd":
            core.submit(make_submit(name, tenant_id=name, prompt_token_ids=[3] * 20), "g")
        deltas = []
        while core.has_work():
            deltas += core.step().deltas.get("g", [])
            core.check()
        assert [delta.outcome.finish for delta in deltas if delta.outcome] == ["length"] * 4
        by_name = {name: [delta for delta in deltas if delta.sequence_id == name] for name in "abcd"}
        answers.append({name: tokens(mine) for name, mine in by_name.items()})
        charged.append(core.counters.values())
    assert answers[0] == answers[1]
    assert charged[0] == charged[1], "what was not computed is not charged"
    assert core.table.max_batched_tokens == 8
    assert "step 1 of 32 tokens does not fit the device's memory (CUDA out of memory.)" in caplog.text
    assert "at most 8 tokens now" in caplog.text


@pytest.mark.parametrize("most_tokens", [1, 0])
def test_what_no_smaller_step_can_help_fails_the_steps_sequences(most_tokens: int) -> None:
    """The loop ends the process where the device is lost; else the engine goes on."""
    core, runner = tight_core("fcfs")
    for name in "ab":
        core.submit(make_submit(name), "g")
    core.step()
    runner.most_tokens = most_tokens
    outcomes = [delta.outcome for delta in core.step().deltas["g"]]
    assert [outcome and outcome.finish for outcome in outcomes] == ["failed", "failed"]
    core.check()
    assert (core.device_lost is not None) == (most_tokens == 0)


def test_knobs_do_not_raise_what_did_not_fit_and_the_steps_grow_again() -> None:
    core, _ = tight_core(most_tokens=8)
    core.submit(make_submit(prompt_token_ids=[1] * 20), "g")
    core.step()
    core.step()
    core.set_knobs(EngineKnobs(token_share=1.0))
    assert core.table.max_batched_tokens == 5, "half of the prompt in two steps: 20, 10"
    for _ in range(RECOVERS_AFTER_STEPS - 1):
        core._budget.computed()
    core.step()
    assert core.table.max_batched_tokens == 10


def test_the_bound_doubles_up_to_the_configured_one() -> None:
    budget = StepBudget(31)
    assert budget.shrink(31, least=1)
    for steps, tokens_then in ((RECOVERS_AFTER_STEPS - 1, 15), (1, 30), (5 * RECOVERS_AFTER_STEPS, 31)):
        for _ in range(steps):
            budget.computed()
        assert budget.tokens == tokens_then
    assert budget.shrink(30, least=20)
    assert budget.tokens == 20
    assert not budget.shrink(20, least=20)
