"""Readings for the length probe: the model's state while the engine answers at temperature 1."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.core.core import EngineConfig, EngineCore
from engine.core.detokenizer import load_texts
from engine.forecast.length.samples import MAX_READINGS, LengthSample, LengthSamples
from engine.messages import SamplingParams, Submit
from gateway.requests.prompt import PromptRenderer
from ops.demo.prompts.instructions import decorate, make_instruction

FAMILY_SHARES = {
    "count": 0.25,
    "repeat": 0.15,
    "spell": 0.12,
    "days": 0.10,
    "months": 0.10,
    "arithmetic": 0.08,
    "reverse": 0.08,
    "sort": 0.06,
    "facts": 0.06,
    "json": 0.08,
    "tools": 0.06,
}
MAX_TOKENS = 384
LONGEST_NOTE_WORDS = 60


def answer_instructions(
    model_dir: Path, number: int, *, seed: int, threads: int
) -> tuple[list[LengthSample], list[int]]:
    """Readings of `number` answers to instructions that training did not hold out, and their layers."""
    from engine.model.length_probe.probe import LengthReadings
    from engine.model.loader import load_runner

    runner = load_runner(model_dir, threads=threads, num_blocks=2048)
    reader = runner.state_reader()
    runner.readings = LengthReadings(reader, None, keep_states=True)
    config = EngineConfig(max_sequences=64, max_batched_tokens=1024, max_waiting=max(1, number))
    core = EngineCore(runner, load_texts(model_dir), config, time.monotonic)
    core.samples = LengthSamples(max_samples=MAX_READINGS * number)
    renderer = PromptRenderer(model_dir)
    rng = random.Random(seed)
    for index in range(number):
        family = rng.choices(list(FAMILY_SHARES), list(FAMILY_SHARES.values()))[0]
        instruction = decorate(make_instruction(family, rng), rng, longest_note_words=LONGEST_NOTE_WORDS)
        core.submit(
            Submit(
                sequence_id=str(index),
                request_id=str(index),
                tenant_id="probe",
                prompt_token_ids=renderer.chat_tokens(instruction.chat()),
                max_tokens=MAX_TOKENS,
                lease_tokens=MAX_TOKENS,
                sampling=SamplingParams(temperature=1.0, seed=index),
            ),
            "probe",
        )
    while core.has_work():
        core.step()
    return core.samples.kept(), reader.layers


def states_of(states: Sequence[bytes]) -> Any:
    """Readings as a tensor, float32; one row each."""
    import numpy as np
    import torch

    if not states:
        return torch.zeros(0, 1)
    return torch.from_numpy(np.stack([np.frombuffer(state, dtype=np.float16) for state in states])).float()
