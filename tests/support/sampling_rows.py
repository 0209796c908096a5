"""Rows of a choice, by way of the rows of a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.core.model_runner import Sampled
from engine.model.rows import DeviceRows
from engine.model.sampler import RowSampling, Wants, choose, read
from tests.support.step_work import SequenceSlice, masks_of, work_of

MOST_TOKENS = 1 << 20


def sample(
    logits: torch.Tensor, rows: Sequence[SequenceSlice], *, fallback_token_id: int = 0
) -> list[Sampled]:
    """The tokens of sequences whose next one has these logits."""
    inputs, wants = inputs_of(rows, logits)
    chosen = choose(logits, inputs, wants, fallback_token_id=fallback_token_id)
    return read(chosen, [row.sampling.logprobs for row in rows])


def inputs_of(rows: Sequence[SequenceSlice], logits: torch.Tensor) -> tuple[RowSampling, Wants]:
    device_rows = DeviceRows(
        len(rows), vocabulary=logits.shape[-1], num_blocks=1, block_tokens=MOST_TOKENS,
        context_tokens=MOST_TOKENS, device=logits.device,
    )  # fmt: skip
    step, masks = device_rows.stage(work_of(rows)), masks_of(rows)
    device_rows.set_masks(masks)
    step.wants = replace(step.wants, mask=bool(masks))
    return device_rows.sampling_of(step), step.wants


def last_token_of(prompt: Sequence[int], output: Sequence[int]) -> SequenceSlice:
    """A sequence that computes its last token."""
    token_ids, computed = [*prompt, *output], len(prompt) + len(output) - 1
    return SequenceSlice("s", token_ids, len(prompt), computed, 1, [0], sample=True)
