"""Sizes of a step and of the KV cache."""

from __future__ import annotations

DECODE_TOKENS = 1
"""Tokens that a decoding sequence computes in a step; speculative decoding will change it."""


def blocks_for(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)
