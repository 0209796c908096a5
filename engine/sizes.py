"""Sizes of a step and of the KV cache."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

DECODE_TOKENS = 1
"""Tokens that a decoding sequence computes in a step; speculative decoding will change it."""
MIXED_SIZES = (64, 128, 256, 512, 768, 1024)
"""Tokens that a captured step with prompts is padded to."""


def blocks_for(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)


def decode_sizes(max_sequences: int) -> tuple[int, ...]:
    """Sequences that a captured decode step is padded to; the last is `max_sequences`."""
    sizes = (1, 2, 4, 8, *range(16, 33, 8), *range(48, 129, 16), *range(160, max_sequences, 32))
    return (*[size for size in sizes if size < max_sequences], max_sequences)


def padded(sizes: Sequence[int], count: int) -> int:
    """The least of the ascending `sizes` that holds `count`; `count` itself where none does."""
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else count
