"""Check that a model gives the same logits packed, chunked and paged as plain.

Architectures that keep state outside of the attention, or mask in their own way, would run and give wrong
logits. Two sequences run through scattered blocks in interleaved chunks; every position's logits are compared
with transformers' own eager attention on each sequence alone.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from engine.core.model_runner import RowStart, StepWork
from engine.messages import ModelInfo, SamplingParams
from engine.model.attention import ATTENTION_NAME, LayerShape
from engine.model.forward import Forward
from engine.model.runner import TorchRunner

PROMPT_TOKENS = (41, 26)
STEPS: tuple[tuple[int, int], ...] = ((17, 0), (1, 9), (1, 1), (21, 1), (1, 15))
"""Tokens of the two sequences computed in each step: alone, mixed with a decode, decode with decode."""


def check_prompts(info: ModelInfo) -> list[list[int]]:
    """Random prompts, always the same for a vocabulary."""
    generator = random.Random(0)
    return [
        [generator.randrange(info.vocabulary) for _ in range(min(length, info.context_tokens))]
        for length in PROMPT_TOKENS
    ]


def plain_logits(model: Any, prompts: list[list[int]], attention: str = "eager") -> list[torch.Tensor]:
    """The plain model's logits at every position: each prompt by itself, an attention of transformers."""
    model.set_attn_implementation(attention)
    try:
        logits = []
        with torch.inference_mode():
            for prompt in prompts:
                token_ids = torch.tensor([prompt], dtype=torch.int64, device=model.device)
                output = model(
                    input_ids=token_ids, attention_mask=torch.ones_like(token_ids), use_cache=False
                )
                logits.append(output.logits[0].float())
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return logits


def spread_of_plain(model: Any, plain: list[torch.Tensor], prompts: list[list[int]]) -> float:
    """Relative difference between two attentions of transformers: what rounding alone does to this model in
    its number format. 0.0 where it has but one."""
    try:
        other = plain_logits(model, prompts, "sdpa")
    except Exception:
        return 0.0
    return _relative_difference(other, plain, model.dtype)


def difference_from_plain(
    forward: Forward,
    plain: list[torch.Tensor],
    info: ModelInfo,
    shapes: dict[int, LayerShape],
    *,
    dtype: torch.dtype,
    device: torch.device,
    block_tokens: int,
) -> float:
    """Relative difference of paged from `plain` logits, as `_relative_difference`."""
    per_prompt = -(-max(PROMPT_TOKENS) // block_tokens)
    runner = TorchRunner(
        forward,
        info,
        shapes,
        dtype=dtype,
        device=device,
        num_blocks=2 * per_prompt,
        block_tokens=block_tokens,
    )
    with torch.inference_mode():
        return _relative_difference(_paged_logits(runner, check_prompts(info), per_prompt), plain, dtype)


def _relative_difference(logits: list[torch.Tensor], plain: list[torch.Tensor], dtype: torch.dtype) -> float:
    """Euclidean, by position: in float32 the largest, in half precision the geometric mean: for rounding a
    router of experts may tip over in single positions, while a wrong attention is wrong in many."""
    differences = torch.cat(
        [
            (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
            for ours, theirs in zip(logits, plain, strict=True)
        ]
    )
    if dtype == torch.float32:
        return float(differences.max())
    return float(differences.clamp(min=torch.finfo(dtype).eps).log().mean().exp())


def _paged_logits(runner: TorchRunner, prompts: list[list[int]], per_prompt: int) -> list[torch.Tensor]:
    tables = [list(range(index, 2 * per_prompt, 2))[::-1] for index in range(2)]
    positions = [0, 0]
    parts: list[list[torch.Tensor]] = [[], []]
    for step in STEPS:
        work = StepWork()
        for row, wanted in enumerate(step):
            position, prompt = positions[row], prompts[row]
            num_tokens = min(wanted, len(prompt) - position)
            if num_tokens <= 0:
                continue
            if not position:
                work.starts.append(RowStart(row, str(row), 0, len(prompt), prompt, SamplingParams(), 0))
                work.blocks += [(row, index, block) for index, block in enumerate(tables[row])]
            work.rows.append(row)
            work.positions.append(position)
            work.num_tokens.append(num_tokens)
            work.samples.append(False)
            work.token_ids.append(prompt[position : position + num_tokens])
            positions[row] += num_tokens
        if not work.rows:
            continue
        logits = runner.logits(work, list(range(sum(work.num_tokens)))).float()
        for row, row_logits in zip(work.rows, logits.split(work.num_tokens), strict=True):
            parts[row].append(row_logits)
    return [torch.cat(part) for part in parts]
