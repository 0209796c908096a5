"""Shares a step's measured duration among its sequences.

In proportion to each one's cost by the fitted step-time model (tokens, context, the sequence itself), the
fixed cost included, in whole microseconds that sum to the duration. Time for recomputing tokens after a
preemption, and for a result that came too late to count, is kept apart: no tenant pays for it.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from typing import TYPE_CHECKING

from engine.messages import StepTime
from engine.scheduling.room import attended_tokens

if TYPE_CHECKING:
    from engine.sequence import Sequence

PICOSECONDS = 10**12
"""Unit of the weights, which are whole: coefficients of the step-time model times this."""


def split_us(duration_us: int, weights: SequenceOf[int]) -> list[int]:
    """`duration_us` in proportion to `weights` (each at least 1), in whole parts that sum to it."""
    total = sum(weights)
    shares: list[int] = []
    before = 0
    for reached in accumulate(weights):
        until = duration_us * reached // total
        shares.append(until - before)
        before = until
    return shares


def share_step(
    parts: SequenceOf[tuple[Sequence, int, int]],
    duration_s: float,
    step_time: StepTime,
    late: Collection[Sequence] = (),
) -> None:
    """Adds each sequence's share. `parts`: a sequence, its tokens computed before the step, and in it; its
    own counts are still those before it. `late`: those whose results do not count any more."""
    per_token = max(1, round(step_time.per_token_s * PICOSECONDS))
    per_context = max(0, round(step_time.per_context_token_s * PICOSECONDS))
    per_sequence = max(0, round(step_time.per_sequence_s * PICOSECONDS))
    weights = [
        per_sequence
        + per_token * tokens
        + per_context * (position + 1 if tokens == 1 else attended_tokens(position, tokens))
        for _, position, tokens in parts
    ]
    shares = split_us(round(duration_s * 1e6), weights)
    for (sequence, position, tokens), share_us in zip(parts, shares, strict=True):
        again = tokens if sequence in late else sequence.ever_computed_tokens - position
        if again > 0:
            again_us = share_us * min(again, tokens) // tokens
            sequence.recomputed_gpu_us += again_us
            share_us -= again_us
        sequence.gpu_us += share_us
