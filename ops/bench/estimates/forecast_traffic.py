"""Answers of the shipped model to instructions, grouped by template.

Instructions as the demo model learned them, answered at temperature 1 by the real engine core, which reads
the model's state as it does when it serves. A *template* is an instruction's wording with everything that
varies taken out ("count from N to N"): a reader of other numbers in the same words has seen
the template.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.core import EngineConfig, EngineCore
from engine.core.detokenizer import load_texts
from engine.forecast.length.features import Features, features_of
from engine.forecast.length.samples import MAX_READINGS, LengthSample, LengthSamples
from engine.messages import SamplingParams, Submit
from gateway.requests.fields.traits import last_asked
from gateway.requests.prompt import PromptRenderer
from ops.demo.instructions import DAYS, MONTHS, decorate, make_instruction

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
}
MAX_TOKENS = 384
LONGEST_NOTE_WORDS = 60
_FIXED_WORDS = frozenset(
    (
        "spell",
        "the",
        "word",
        "how",
        "do",
        "you",
        "reverse",
        "list",
        "write",
        "backwards",
        "repeat",
        "say",
        "N",
        "times",
        "L",
    )
)
_NAMES = re.compile("|".join(name.lower() for name in (*DAYS, *MONTHS)))


@dataclass(frozen=True, slots=True)
class AnsweredInstruction:
    """One instruction and the answer's length."""

    family: str
    template: str
    features: Features
    output_tokens: int
    readings: tuple[LengthSample, ...]
    """The first one after no token."""


def template_of(family: str, prompt: str) -> str:
    """The wording without what varies."""
    text = prompt.splitlines()[-1].lower().rstrip(".?! ").removesuffix(", one per line")
    text = re.sub(r"[\"'].*[\"']", "Q", text)
    text = re.sub(r"\d+", "N", text)
    text = re.sub(r"\btime\b", "times", _NAMES.sub("D", text))
    text = re.sub(r"(?<![a-z])[a-z](, [a-z])+(?![a-z])", "L", text)
    text = re.sub(r"N(, N)+", "L", text)
    if family in ("spell", "reverse", "repeat"):
        # A word without quotation marks.
        text = " ".join(word if word in _FIXED_WORDS else "Q" for word in text.split())
    if family == "facts":
        text = re.sub(r"\bis (an? )?\w+ an? \w+", "is X a K", text)
    return f"{family}: {text}"


class _Recorder(LengthSamples):
    """Keeps each sequence's samples apart, too."""

    def __init__(self) -> None:
        super().__init__(max_samples=MAX_READINGS)
        self.by_sequence: dict[str, tuple[LengthSample, ...]] = {}

    def ended(self, sequence_id: str, output_tokens: int | None) -> None:
        before = self.total
        super().ended(sequence_id, output_tokens)
        added = self.total - before
        self.by_sequence[sequence_id] = tuple(self.kept()[-added:]) if added else ()


def answer_instructions(
    model_dir: Path,
    number: int,
    *,
    seed: int,
    threads: int,
    held_out: bool | None = None,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[AnsweredInstruction]:
    """`number` instructions, answered at temperature 1; `held_out`: those that neither the model nor its
    probe was trained on, False: only the others, None: any. Some two hundred a second and core."""
    from engine.model.length_probe.probe import LengthReadings
    from engine.model.loader import load_runner

    runner = load_runner(model_dir, threads=threads, num_blocks=2048)
    runner.readings = LengthReadings(runner.state_reader(), None, keep_states=True)
    config = EngineConfig(max_sequences=64, max_batched_tokens=1024, max_waiting=max(1, number))
    core = EngineCore(runner, load_texts(model_dir), config, time.monotonic)
    recorder = core.samples = _Recorder()
    renderer = PromptRenderer(model_dir)
    rng = random.Random(seed)
    asked: dict[str, tuple[str, str, Features]] = {}
    for index in range(number):
        family = rng.choices(list(FAMILY_SHARES), list(FAMILY_SHARES.values()))[0]
        instruction = decorate(
            make_instruction(family, rng, held_out=held_out), rng, longest_note_words=LONGEST_NOTE_WORDS
        )
        tokens = renderer.chat_tokens(instruction.chat())
        sequence_id = f"instruction {index}"
        asked[sequence_id] = (
            family,
            template_of(family, instruction.prompt),
            features_of(
                last_asked(instruction.chat()), prompt_tokens=len(tokens), turns=len(instruction.messages)
            ),
        )
        core.submit(
            Submit(
                sequence_id=sequence_id,
                request_id=sequence_id,
                tenant_id="bench",
                prompt_token_ids=tokens,
                max_tokens=MAX_TOKENS,
                lease_tokens=MAX_TOKENS,
                sampling=SamplingParams(temperature=1.0, seed=index),
            ),
            "bench",
        )
    answered: list[AnsweredInstruction] = []
    while core.has_work():
        result = core.step()
        for delta in (delta for deltas in result.deltas.values() for delta in deltas):
            if delta.outcome is None:
                continue
            readings = recorder.by_sequence.pop(delta.sequence_id)
            answered.append(
                AnsweredInstruction(*asked[delta.sequence_id], delta.outcome.emitted_tokens, readings)
            )
        progress(len(answered), number)
    return answered


def state_layers(model_dir: Path) -> list[int]:
    """Which of the model's layers are read."""
    from engine.model.loader import load_runner

    return load_runner(model_dir, num_blocks=1, fast_paths=False).state_reader().layers


def states_of(states: Sequence[bytes]) -> Any:
    """Readings as a tensor, float32; one row each."""
    import numpy as np
    import torch

    if not states:
        return torch.zeros(0, 1)
    return torch.from_numpy(np.stack([np.frombuffer(state, dtype=np.float16) for state in states])).float()
