"""Does batched, chunked, paused, moved and evicted greedy decoding give transformers' own tokens?

Acceptance 3 of the first release, DESIGN's invariant 7: float32, CPU, for the model that ships with the
project and for each random-weight architecture.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.model.loader import load_runner
from engine.model.runner import TorchRunner
from ops.demo.instructions import FAMILIES, held_out_instructions
from tests.integration.exactness import Evidence, Job, Reference, run_engine
from tests.models.random_models import save_random_model

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gpt2")
OTHERS = ("gemma2", "gpt_oss", "deepseek_v3")
"""Softcap with windows; sinks; keys and values of different widths."""
SHIPPED_MODEL = Path(__file__).parents[2] / "ops" / "demo" / "model"
RUNS = (
    {"max_batched_tokens": 8, "max_sequences": 8, "seed": 1},
    {"max_batched_tokens": 19, "max_sequences": 16, "seed": 2},
    {"max_batched_tokens": 37, "max_sequences": 16, "seed": 3},
    {"max_batched_tokens": 150, "max_sequences": 32, "seed": 4},
)
"""Chunk sizes, batch sizes, and seeds of arrivals, leases and moves."""
MAX_DIVERGENT_SHARE = 0.001


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def plain_model(model_dir: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def compare(
    reference: Reference, runner: TorchRunner, jobs: list[Job], runs: tuple[dict[str, int], ...] = RUNS
) -> None:
    """Every run's output is the reference's, and the runs really did what they are there for."""
    tokens = divergences = 0
    evidences: list[Evidence] = []
    for run in runs:
        emitted, evidence = run_engine(runner, jobs, **run)
        evidences.append(evidence)
        for job in jobs:
            divergences += reference.divergences(job, emitted[job.job_id])
            tokens += len(emitted[job.job_id])
        assert evidence.most_sequences >= 4, "not batched"
    assert divergences <= tokens * MAX_DIVERGENT_SHARE, f"{divergences} divergences in {tokens} tokens"
    total = Evidence.sum(evidences)
    assert total.most_sequences >= 5
    assert total.mixed_steps > 10 * len(runs)
    assert len(total.chunked_prompts) > 5
    assert total.preemptions > len(runs)
    assert total.recomputed_tokens > 100 * len(runs)
    assert total.pauses > 20 * len(runs)
    assert total.moves_with_kv > 2 * len(runs)


@pytest.mark.parametrize("name", ARCHITECTURES + OTHERS)
def test_random_models_give_generates_tokens_however_they_are_batched(name: str, tmp_path: Path) -> None:
    model_dir = save_random_model(name, tmp_path / name)
    runner = load_runner(model_dir, num_blocks=36, block_tokens=4, dtype="float32", device="cpu")
    generator = random.Random(7)
    jobs = [
        Job(
            job_id=f"job-{number}",
            tenant_id=f"tenant-{number % 5}",
            prompt=[generator.randrange(3, 500) for _ in range(generator.choice((1, 2, 9, 23, 40, 77)))],
            max_tokens=generator.randint(4, 60),
        )
        for number in range(26)
    ]
    reference = Reference(plain_model(model_dir), runner.info.eos_token_ids)
    compare(reference, runner, jobs, RUNS if name in ARCHITECTURES else RUNS[:2])
    outputs = [token for job in jobs for token in reference.answer(job)]
    assert len(set(outputs)) > 60, "the random model repeats itself: the comparison shows little"


def test_the_shipped_model_gives_generates_tokens_however_it_is_batched() -> None:
    runner = load_runner(SHIPPED_MODEL, num_blocks=28, block_tokens=8, dtype="float32", device="cpu")
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
    compare(reference, runner, jobs, RUNS[1:])
    answers = [reference.answer(job) for job in jobs]
    assert sum(answer[-1] in runner.info.eos_token_ids for answer in answers) > len(answers) // 2
    assert len({len(answer) for answer in answers}) > 5
