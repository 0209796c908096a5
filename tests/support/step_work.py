"""Work of a model runner from whole sequences: each slice takes a row of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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


def run_step(runner: ModelRunner, slices: Sequence[SequenceSlice]) -> list[Sampled | None]:
    return runner.collect(runner.launch(work_of(slices))).sampled
