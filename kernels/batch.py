"""`PackedBatch`: the tokens of one step and the places of their contexts in the paged cache.

A step's tokens are one ragged row, sequence after sequence, without padding. The cache of one layer is two
tensors `[blocks, block_tokens, kv_heads, head_dim]`; slot `block * block_tokens + offset` is one token's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch

Integers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


@dataclass(frozen=True, slots=True)
class RowTables:
    """Positions of the packed rows as arrays, for compiled kernels and without a loop over tokens."""

    contexts: Integers
    """`[tokens]`: number of tokens that a row may see, itself included; its position is one less."""
    table_starts: Integers
    """`[tokens]`: where in `tables` the row's sequence begins."""
    tables: Integers
    """All sequences' used blocks, one after the other."""
    slots: Integers
    """`[tokens]`: where a row's key and value are written."""
    most_context: int

    def only(self, rows: Integers) -> RowTables:
        return RowTables(
            contexts=self.contexts[rows],
            table_starts=self.table_starts[rows],
            tables=self.tables,
            slots=self.slots[rows],
            most_context=self.most_context,
        )


@dataclass(slots=True)
class PackedBatch:
    """One step's ragged batch. Sequence i owns rows `cu_seqlens_q[i] : cu_seqlens_q[i + 1]`, the last tokens
    of a context of `context_lens[i]` tokens, whose keys and values lie in `block_tables[i]`."""

    cu_seqlens_q: list[int]
    context_lens: list[int]
    block_tables: list[list[int]]
    block_tokens: int
    rows: RowTables
    device: torch.device
    derived: dict[Any, Any] = field(default_factory=dict)
    """A value that a kernel derived from the tables, cached for the step's other layers."""

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens_q[-1]

    @property
    def slots(self) -> torch.Tensor:
        """`[tokens]` int64: where each row's key and value are written."""
        slots: torch.Tensor | None = self.derived.get("slots")
        if slots is None:
            slots = self.derived["slots"] = torch.from_numpy(self.rows.slots).to(self.device)
        return slots

    @property
    def fresh_blocks(self) -> torch.Tensor | None:
        """`[n]` int64: blocks whose first slot is written in this step; None: there are none."""
        if "fresh_blocks" not in self.derived:
            fresh = self.rows.slots[self.rows.slots % self.block_tokens == 0] // self.block_tokens
            self.derived["fresh_blocks"] = torch.from_numpy(fresh).to(self.device) if fresh.size else None
        blocks: torch.Tensor | None = self.derived["fresh_blocks"]
        return blocks

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
    """Packs sequences; the last `query_lens[i]` of `context_lens[i]` tokens are computed now. Raises
    `ValueError` where that is none or more than the context, or a block table is too short."""
    if not len(query_lens) == len(context_lens) == len(block_tables):
        raise ValueError("query_lens, context_lens and block_tables must have one entry a sequence")
    queries = np.array(query_lens, dtype=np.int64)
    contexts = np.array(context_lens, dtype=np.int64)
    blocks = np.array([len(table) for table in block_tables], dtype=np.int64)
    _validate(queries, contexts, blocks, block_tokens)
    ends = queries.cumsum()
    starts = blocks.cumsum() - blocks
    tables = np.fromiter(chain.from_iterable(block_tables), dtype=np.int64, count=int(blocks.sum()))
    num_tokens = int(ends[-1]) if ends.size else 0
    if num_tokens == len(queries):  # every sequence computes one token: a row is a sequence
        row_contexts, row_starts = contexts, starts
    else:
        row_contexts = np.repeat(contexts - ends + 1, queries) + np.arange(num_tokens)
        row_starts = np.repeat(starts, queries)
    positions = row_contexts - 1
    slots = tables[row_starts + positions // block_tokens] * block_tokens + positions % block_tokens
    return PackedBatch(
        cu_seqlens_q=[0, *ends.tolist()],
        context_lens=list(context_lens),
        block_tables=list(block_tables),
        block_tokens=block_tokens,
        rows=RowTables(
            contexts=row_contexts,
            table_starts=row_starts,
            tables=tables,
            slots=slots,
            most_context=max(context_lens, default=0),
        ),
        device=device,
    )


def _validate(queries: Integers, contexts: Integers, blocks: Integers, block_tokens: int) -> None:
    wrong = np.flatnonzero((queries < 1) | (queries > contexts))
    if wrong.size:
        query, context = queries[wrong[0]], contexts[wrong[0]]
        raise ValueError(f"a sequence computes {query} tokens of a context of {context}")
    wrong = np.flatnonzero(contexts > blocks * block_tokens)
    if wrong.size:
        context, count = contexts[wrong[0]], blocks[wrong[0]]
        raise ValueError(f"a context of {context} tokens does not fit in {count} blocks of {block_tokens}")


def array_of(tensor: torch.Tensor) -> Any:
    """A CPU tensor's memory as a numpy array; bfloat16, unknown to numpy, as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
