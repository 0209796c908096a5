"""Which tokens does one step compute, and where in the paged cache do their contexts lie?

A step's tokens are packed into one ragged row: sequence after sequence, no padding. Everything that an
attention kernel derives from the block tables is built once a step and shared by all layers.

The cache of one layer is two tensors `[blocks, block_tokens, kv_heads, head_dim]`; slot number
`block * block_tokens + offset` names one token in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class PackedBatch:
    """One step's ragged batch.

    Sequence i owns rows `cu_seqlens_q[i] : cu_seqlens_q[i + 1]` of the packed row; these are the last tokens
    of a context of `context_lens[i]` tokens, whose keys and values lie in `block_tables[i]`.
    """

    cu_seqlens_q: list[int]
    context_lens: list[int]
    block_tables: list[list[int]]
    block_tokens: int
    slots: torch.Tensor
    """`[tokens]` int64: where each row's key and value are written."""
    fresh_blocks: torch.Tensor | None
    """`[n]` int64: blocks whose first slot is written in this step; None: there are none."""
    device: torch.device
    derived: dict[Any, Any] = field(default_factory=dict)
    """What a kernel derived from the tables, kept for the step's other layers."""

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens_q[-1]

    def query_tokens(self, index: int) -> int:
        """Rows of sequence `index` in this step."""
        return self.cu_seqlens_q[index + 1] - self.cu_seqlens_q[index]


def pack(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[list[int]],
    *,
    block_tokens: int,
    device: torch.device,
) -> PackedBatch:
    """Packs sequences of which the last `query_lens[i]` tokens of `context_lens[i]` are computed now.

    Raises `ValueError` when a sequence computes nothing, or more than its context, or when its table is
    too short.
    """
    if not len(query_lens) == len(context_lens) == len(block_tables):
        raise ValueError("query_lens, context_lens and block_tables must have one entry a sequence")
    cu_seqlens_q = [0]
    slots: list[int] = []
    fresh: list[int] = []
    for query_len, context_len, table in zip(query_lens, context_lens, block_tables, strict=True):
        if not 1 <= query_len <= context_len:
            raise ValueError(f"a sequence computes {query_len} tokens of a context of {context_len}")
        if context_len > len(table) * block_tokens:
            raise ValueError(
                f"a context of {context_len} tokens does not fit in {len(table)} blocks of {block_tokens}"
            )
        cu_seqlens_q.append(cu_seqlens_q[-1] + query_len)
        for position in range(context_len - query_len, context_len):
            block, offset = table[position // block_tokens], position % block_tokens
            slots.append(block * block_tokens + offset)
            if offset == 0:
                fresh.append(block)
    return PackedBatch(
        cu_seqlens_q=cu_seqlens_q,
        context_lens=list(context_lens),
        block_tables=list(block_tables),
        block_tokens=block_tokens,
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        fresh_blocks=torch.tensor(fresh, dtype=torch.int64, device=device) if fresh else None,
        device=device,
    )
