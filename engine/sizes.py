"""Sizes in blocks of the KV cache."""

from __future__ import annotations


def blocks_for(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)
