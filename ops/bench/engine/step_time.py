"""Error of the step-time model by the shape of the step.

A random load (prompts of all lengths, up to as many sequences as fit) runs through the real engine core. On
its first half the model learns online, as it does when it serves; on the second it only predicts, and its
predictions are compared with the durations of the steps, the engine's own work between them included.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.core.core import EngineConfig, EngineCore
from engine.core.detokenizer import load_texts
from engine.messages import SamplingParams, Submit
from engine.step_time.model import StepTimeModel
from ops.reporting import Report, quantile, verdict

MAX_SEQUENCES = 32
MAX_BATCHED_TOKENS = 512
WANTED_ERROR = 0.15
"""Median relative error over all shapes."""


@dataclass(frozen=True, slots=True)
class SeenStep:
    """Work and duration of a step."""

    tokens: int
    context_tokens: int
    sequences: int
    duration_s: float
    predicted_s: float
    """Before it ran."""


class _Watched(StepTimeModel):
    """Records every step; learns from it while `learns`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[SeenStep] = []
        self.learns = True

    def observe(self, tokens: int, context_tokens: int, sequences: int, duration_s: float) -> None:
        predicted_s = self.predict(tokens, context_tokens, sequences)
        self.seen.append(SeenStep(tokens, context_tokens, sequences, duration_s, predicted_s))
        if self.learns:
            super().observe(tokens, context_tokens, sequences, duration_s)


def run(
    *,
    model: str | None,
    steps: int,
    threads: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> dict[str, Any]:
    """Loads the model and measures."""
    from engine.model.loader import load_runner
    from ops.demo.training.evaluate import MODEL_DIRECTORY

    directory = Path(model) if model else MODEL_DIRECTORY
    runner = load_runner(directory, threads=threads, num_blocks=2048)
    watched = _Watched()
    config = EngineConfig(max_sequences=MAX_SEQUENCES, max_batched_tokens=MAX_BATCHED_TOKENS)
    core = EngineCore(runner, load_texts(directory), config, time.monotonic, step_time=watched)
    rng = random.Random(seed)
    longest = min(768, runner.info.context_tokens // 2)
    submitted = 0
    while len(watched.seen) < 2 * steps:
        # Bursts: small and large batches, prefill and decode.
        if not core.has_work():
            for _ in range(rng.choice((1, 2, 4, 8, 16, 32, 48))):
                submitted += 1
                core.submit(_random_submit(rng, submitted, longest, runner.info.vocabulary), "bench")
        core.step()
        watched.learns = len(watched.seen) < steps
        progress(len(watched.seen), 2 * steps)
    return report(watched.seen[steps:], watched)


def report(seen: list[SeenStep], model: StepTimeModel) -> dict[str, Any]:
    """By shape: the number of steps, their durations and predictions."""
    groups: dict[str, list[SeenStep]] = defaultdict(list)
    for step in seen:
        groups[shape_of(step)].append(step)
    shapes = [_shape(name, groups[name]) for name in sorted(groups)]
    errors = [abs(step.predicted_s - step.duration_s) / step.duration_s for step in seen]
    median_error = quantile(errors, 0.5)
    busy_s = sum(step.duration_s for step in seen)
    return {
        "shapes": shapes,
        "steps": len(seen),
        "mape": sum(errors) / len(errors),
        "median_error": median_error,
        "whole_time_error": sum(step.predicted_s for step in seen) / busy_s - 1,
        "fit": msgspec.to_builtins(model.to_message()),
        "ok": median_error <= WANTED_ERROR,
    }


def shape_of(step: SeenStep) -> str:
    """Alike steps have the same name: by sequences and mean context, and whether prompts are among them."""
    width = 1 << max(0, step.sequences - 1).bit_length()
    if step.tokens == step.sequences:
        kind, context = "decode", step.context_tokens // step.sequences
    else:
        kind, context = "with prompts", step.tokens
    bound = next((bound for bound in (64, 128, 256, 512) if context <= bound), 1024)
    measure = "context" if kind == "decode" else "tokens"
    return f"{kind}, up to {width:2d} sequences, {measure} up to {bound:4d}"


def show(found: dict[str, Any]) -> None:
    """The table for people."""
    Report(
        "step times, predicted and measured",
        (
            ("shape", "shape"),
            ("steps", "steps"),
            ("measured_ms", "measured p50, ms", ".2f"),
            ("predicted_ms", "predicted p50, ms", ".2f"),
            ("mape", "MAPE", ".1%"),
        ),
        [
            shape | {f"{name}_ms": 1e3 * shape[f"{name}_p50_s"] for name in ("measured", "predicted")}
            for shape in found["shapes"]
        ],
    ).show()
    fit = found["fit"]
    print(
        f"all {found['steps']} steps: MAPE {100 * found['mape']:.1f} %, median error"
        f" {100 * found['median_error']:.1f} % (at most {100 * WANTED_ERROR:.0f} % wanted), whole time"
        f" {100 * found['whole_time_error']:+.1f} %: {verdict(found)}"
    )
    print(
        f"t = {1e3 * fit['base_s']:.3f} ms + {1e6 * fit['per_token_s']:.1f} us a token +"
        f" {1e9 * fit['per_context_token_s']:.1f} ns a token attended to +"
        f" {1e6 * fit['per_sequence_s']:.1f} us a sequence"
    )


def _shape(name: str, steps: list[SeenStep]) -> dict[str, Any]:
    return {
        "shape": name,
        "steps": len(steps),
        "measured_p50_s": quantile([step.duration_s for step in steps], 0.5),
        "predicted_p50_s": quantile([step.predicted_s for step in steps], 0.5),
        "mape": sum(abs(step.predicted_s - step.duration_s) / step.duration_s for step in steps) / len(steps),
    }


def _random_submit(rng: random.Random, number: int, longest: int, vocabulary: int) -> Submit:
    prompt = [rng.randrange(1, vocabulary) for _ in range(int(8 * (longest / 8) ** rng.random()))]
    output = int(4 * 24 ** rng.random())
    return Submit(
        sequence_id=f"step-time {number}",
        request_id=f"step-time {number}",
        tenant_id="bench",
        prompt_token_ids=prompt,
        max_tokens=output,
        lease_tokens=output,
        sampling=SamplingParams(temperature=0.0, ignore_eos=True),
    )
