"""Work of a model runner from whole sequences: each slice takes a row of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.core.model_runner import ModelRunner, RowStart, Sampled, StepWork
from engine.messages import SamplingParams


@dataclass
class SequenceSlice:
    """The tokens `[position : position + num_tokens]` of one sequence."""

    sequence_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    position: int
    num_tokens: int
    block_table: list[int]
    sample: bool
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    mask: np.ndarray | None = None
    """As `ModelRunner.choose` takes it."""


def work_of(slices: Sequence[SequenceSlice]) -> StepWork:
    return StepWork(
        rows=list(range(len(slices))),
        positions=[piece.position for piece in slices],
        num_tokens=[piece.num_tokens for piece in slices],
        samples=[piece.sample for piece in slices],
        token_ids=[piece.token_ids[piece.position : piece.position + piece.num_tokens] for piece in slices],
        starts=[
            RowStart(
                row, piece.sequence_id, piece.position, piece.num_prompt_tokens,
                piece.token_ids[: piece.position + piece.num_tokens], piece.sampling, piece.seed,
            )
            for row, piece in enumerate(slices)
        ],
        blocks=[
            (row, index, block)
            for row, piece in enumerate(slices)
            for index, block in enumerate(piece.block_table)
        ],
    )  # fmt: skip


def mask_of(allowed: Collection[int], vocabulary: int) -> np.ndarray:
    """The mask that allows these tokens."""
    bits = np.isin(np.arange(-(-vocabulary // 32) * 32), list(allowed))
    return np.packbits(bits, bitorder="little").view(np.int32)


def masks_of(slices: Sequence[SequenceSlice]) -> dict[int, np.ndarray]:
    return {row: piece.mask for row, piece in enumerate(slices) if piece.mask is not None}


def run_step(runner: ModelRunner, slices: Sequence[SequenceSlice]) -> list[Sampled | None]:
    work, masks = work_of(slices), masks_of(slices)
    work.awaits_masks = bool(masks)
    ticket = runner.launch(work)
    if masks:
        runner.choose(ticket, masks)
    return runner.collect(ticket).sampled
