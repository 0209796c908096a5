"""Batched, chunked, paused, swapped, recomputed, cached and moved greedy decoding gives transformers' tokens,
for every architecture.

DESIGN's invariant 7: float32, CPU, for the model that ships with the project and for each random-weight
architecture; everything that can happen to a sequence happens in the same histories. Each path by itself, and
each policy: `test_exactness_paths.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from engine.model.loader import load_runner
from ops.demo.prompts.instructions import FAMILIES
from ops.demo.training.streams import held_out_instructions
from tests.integration.exactness import PATHS, Job, Reference, Run, compare, plain_model, random_jobs
from tests.models.random_models import save_random_model

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gpt2", "gemma2", "gpt_oss", "deepseek_v3")
"""The last three: softcap with windows; sinks; keys and values of different widths."""
SHIPPED_MODEL = Path(__file__).parents[2] / "ops" / "demo" / "model"
RUNS = (
    Run(max_batched_tokens=12, max_sequences=2, seed=1, num_host_blocks=12, policy="srpt"),
    Run(max_batched_tokens=150, max_sequences=32, seed=4, num_host_blocks=12, burst=20, move_share=0.03),
    Run(
        max_batched_tokens=37, max_sequences=16, seed=3, num_host_blocks=30, policy="hybrid", move_share=0.03
    ),
    Run(max_batched_tokens=37, max_sequences=16, seed=2, num_host_blocks=30, move_share=0.03, steps_ahead=1),
)
"""Chunk sizes, batch sizes, and seeds of arrivals, leases and moves; the last one launches a step ahead."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_models_give_generates_tokens_whatever_happens_to_them(name: str, tmp_path: Path) -> None:
    model_dir = save_random_model(name, tmp_path / name)
    runner = load_runner(
        model_dir, num_blocks=36, block_tokens=4, dtype="float32", device="cpu", num_host_blocks=30
    )
    jobs = random_jobs(20, seed=7, most_tokens=40)
    reference = Reference(plain_model(model_dir), runner.info.eos_token_ids)
    met = compare(reference, runner, jobs, RUNS)
    assert all(met[path] > 0 for path in PATHS), met
    outputs = [token for job in jobs for token in reference.answer(job)]
    assert len(set(outputs)) > 40, "the random model repeats itself: the comparison shows little"


def test_the_shipped_model_gives_generates_tokens_whatever_happens_to_it() -> None:
    runner = load_runner(
        SHIPPED_MODEL, num_blocks=28, block_tokens=8, dtype="float32", device="cpu", num_host_blocks=30
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    instructions = [
        instruction for family in FAMILIES for instruction in held_out_instructions(family, 6, seed=5)
    ]
    jobs = [
        Job(
            job_id=f"question-{number}",
            tenant_id=f"tenant-{number % 3}",
            prompt=tokenizer.apply_chat_template(
                instruction.chat(), add_generation_prompt=True, return_dict=False
            ),
            max_tokens=120,
        )
        for number, instruction in enumerate(instructions)
    ]
    # Short enough to fit several into a pool so small that it runs out.
    jobs = [job for job in jobs if len(job.prompt) <= 80]
    reference = Reference(plain_model(SHIPPED_MODEL), runner.info.eos_token_ids)
    met = compare(reference, runner, jobs, RUNS)
    # All prompts begin alike, so that only the very first ones could wait for each other.
    assert all(met[path] > 0 for path in PATHS if path not in ("adopted", "deferred")), met
    answers = [reference.answer(job) for job in jobs]
    assert sum(answer[-1] in runner.info.eos_token_ids for answer in answers) > len(answers) // 2
    assert len({len(answer) for answer in answers}) > 5
