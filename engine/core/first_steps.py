"""Times an engine's first steps, at its start: its step-time model begins with measurements.

A core of its own runs made-up prompts over the same runner: one sequence, then four times as many each time,
up to the engine's places, for as long as the start may take. The KV that this writes is never used. Before,
on a GPU, `largest_step` shows what memory the largest step takes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from engine.core.core import EngineConfig, EngineCore, TextFactory
from engine.core.model_runner import ModelRunner
from engine.messages import SamplingParams, Submit
from engine.scheduling.options import PolicyOptions
from engine.sizes import blocks_for
from engine.step_time.model import StepTimeModel, TimedStep, padded_shape

MOST_S = 0.5
"""Nothing is begun after this."""
WIDER = 4
PROMPT_TOKENS = 24
OUTPUT_TOKENS = 4
SAMPLING = SamplingParams(ignore_eos=True)
EVERY_OPTION = SamplingParams(
    top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1,
    logprobs=20, ignore_eos=True,
)  # fmt: skip
"""What a sampler needs most memory for."""


class _StepTimes(StepTimeModel):
    """Keeps the steps as they were, too."""

    def __init__(self) -> None:
        super().__init__(keeps_mean=False)
        self.steps: list[TimedStep] = []

    def observe(self, tokens: int, context_tokens: int, sequences: int, duration_s: float) -> None:
        shape = padded_shape(self, tokens, sequences)
        self.steps.append((shape[0], context_tokens, shape[1], duration_s))
        super().observe(tokens, context_tokens, sequences, duration_s)


def prompt_lengths(sequences: int, tokens: int, context_tokens: int) -> list[int]:
    """Prompts of the largest step: `tokens` in `sequences` prompts, the first as long as it can be."""
    lengths, left = [], tokens
    for others in reversed(range(sequences)):
        lengths.append(max(1, min(context_tokens - 1, left - others)))
        left -= lengths[-1]
    return lengths


def largest_step(runner: ModelRunner, texts: TextFactory, lengths: list[int]) -> bool:
    """Computes prompts of these lengths in one step and samples from each. False: the device failed."""
    most = sum(lengths)
    config = EngineConfig(
        policy="fcfs", max_batched_tokens=most, max_sequences=len(lengths), watermark_permille=0,
        prefix_caching=False, steps_ahead=0,
    )  # fmt: skip
    core = EngineCore(runner, texts, config, lambda: 0.0)
    for index, length in enumerate(lengths):
        core.submit(Submit(str(index), "", "", [0] * length, 1, 1, sampling=EVERY_OPTION), "")
    return core.step().num_tokens == most


def timed_steps(
    runner: ModelRunner, texts: TextFactory, config: EngineConfig, clock: Callable[[], float]
) -> StepTimeModel:
    """The model of the steps that were timed. The sleep of a ceiling on tokens counts and is not slept."""
    slept_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept_s
        slept_s += seconds

    length = max(1, min(PROMPT_TOKENS, runner.info.context_tokens - OUTPUT_TOKENS))
    fitting = runner.num_blocks // blocks_for(length + OUTPUT_TOKENS, runner.block_tokens)
    places, width = min(config.max_sequences, fitting), 1
    plain = replace(config, policy="fcfs", policy_options=PolicyOptions(), prefix_caching=False)
    numbers, until_s = random.Random(0), clock() + MOST_S
    warm: list[TimedStep] = []
    noted = _StepTimes()
    while width <= places:
        for is_warm in (False, True):  # the first steps of a width are slower than all later ones
            if noted.steps and clock() >= until_s:
                return StepTimeModel.of_steps(warm or noted.steps)
            noted = _StepTimes()
            core = EngineCore(runner, texts, plain, lambda: clock() + slept_s, step_time=noted, sleep=sleep)
            for index in range(width):
                prompt = [numbers.randrange(runner.info.vocabulary) for _ in range(length)]
                core.submit(
                    Submit(str(index), "", "", prompt, OUTPUT_TOKENS, OUTPUT_TOKENS, sampling=SAMPLING), ""
                )
            while core.has_work():
                core.step()
            warm += noted.steps if is_warm else []
        width = places if width < places < WIDER * width else WIDER * width
    return StepTimeModel.of_steps(warm)
