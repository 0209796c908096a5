"""`PackedBatch`: the tokens of one step and the places of their contexts in the paged cache.

A step's tokens are one ragged row, sequence after sequence, without padding. The cache of one layer is two
tensors `[blocks, block_tokens, kv_heads, head_dim]`; slot `block * block_tokens + offset` is one token's.
What the host knows (lengths, where tables begin) is in lists; positions and slots are computed where the
block tables are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Integers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


@dataclass(frozen=True, slots=True)
class RowTables:
    """Positions of the packed rows as arrays, for compiled kernels on a CPU."""

    contexts: Integers
    """`[tokens]`: number of tokens that a row may see, itself included; its position is one less."""
    table_starts: Integers
    """`[tokens]`: where in `tables` the row's sequence begins."""
    tables: Integers
    """Block tables, one after the other."""
    slots: Integers
    """`[tokens]`: where a row's key and value are written."""
    most_context: int

    def only(self, rows: Integers) -> RowTables:
        contexts, starts, slots = self.contexts[rows], self.table_starts[rows], self.slots[rows]
        return RowTables(contexts, starts, self.tables, slots, self.most_context)


@dataclass(slots=True)
class PackedBatch:
    """One step's ragged batch. Sequence i owns rows `cu_seqlens_q[i] : cu_seqlens_q[i + 1]`, the last tokens
    of a context of `context_lens[i]` tokens, whose blocks `tables` names from `table_starts[i]` on. Tensors
    are int64, on the device."""

    cu_seqlens_q: list[int]
    context_lens: list[int]
    table_starts: list[int]
    tables: Tensor
    contexts: Tensor
    """`[sequences]`: `context_lens`, on the device."""
    token_contexts: Tensor
    """`[tokens]`: number of tokens that a row may see, itself included; 0: the row is padding."""
    token_tables: Tensor
    """`[tokens]`: where in `tables` the row's sequence begins."""
    slots: Tensor
    """`[tokens]`: where each row's key and value are written; -1: the row is padding."""
    block_tokens: int
    fresh: Tensor | None = None
    """Where in `tables` the blocks are whose first slot is written in this step; None on a CPU, where they
    are found by the slots."""
    tiles: Tensor | None = None
    """`[tiles, 2]`: parts of sequences for kernels that compute so (row of the first token, tokens; 0 tokens:
    padding). None: every sequence computes one token, or no kernel wants them."""
    derived: dict[Any, Any] = field(default_factory=dict)
    """A value that a kernel derived from the tables, cached for the step's other layers."""

    @property
    def device(self) -> torch.device:
        return self.tables.device

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens_q[-1]

    @property
    def rows(self) -> RowTables:
        """The same as arrays; on a CPU only."""
        rows: RowTables | None = self.derived.get("rows")
        if rows is None:
            rows = self.derived["rows"] = RowTables(
                contexts=self.token_contexts.numpy(),
                table_starts=self.token_tables.numpy(),
                tables=self.tables.numpy(),
                slots=self.slots.numpy(),
                most_context=max(self.context_lens, default=0),
            )
        return rows

    @property
    def fresh_blocks(self) -> Tensor | None:
        """`[n]` int64: blocks whose first slot is written in this step; None: there are none."""
        if "fresh_blocks" not in self.derived:
            if self.fresh is not None:
                fresh = self.tables.index_select(0, self.fresh)
            else:
                fresh = self.slots[self.slots % self.block_tokens == 0] // self.block_tokens
            self.derived["fresh_blocks"] = fresh if fresh.shape[0] else None
        blocks: Tensor | None = self.derived["fresh_blocks"]
        return blocks

    def query_tokens(self, index: int) -> int:
        """Rows of sequence `index` in this step."""
        return self.cu_seqlens_q[index + 1] - self.cu_seqlens_q[index]

    def table(self, index: int) -> Tensor:
        """The used blocks of sequence `index`: a part of `tables`."""
        start, used = self.table_starts[index], -(-self.context_lens[index] // self.block_tokens)
        return self.tables[start : start + used]


def lay_out(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    table_starts: Sequence[int],
    tables: Tensor,
    starts: Tensor,
    contexts: Tensor,
    queries: Tensor | None,
    *,
    block_tokens: int,
    fresh: Tensor | None = None,
    tiles: Tensor | None = None,
    padding: int | None = None,
) -> PackedBatch:
    """The batch of sequences whose tables begin in `tables` at `starts`. `starts`, `contexts` and `queries`
    `[sequences]` are `table_starts`, `context_lens` and `query_lens` on the device; `queries` None: every
    sequence computes one token. Tokens whose table begins at `padding` are padding."""
    ends = list(accumulate(query_lens))
    token_contexts, token_tables = contexts, starts
    if queries is not None:
        tokens = ends[-1] if ends else 0
        firsts = contexts - queries.cumsum(0) + 1  # of a row's context, less its place in the batch
        token_contexts = firsts.repeat_interleave(queries, output_size=tokens)
        token_contexts = token_contexts + torch.arange(tokens, device=tables.device)
        token_tables = starts.repeat_interleave(queries, output_size=tokens)
    is_padding = None if padding is None else token_tables == padding
    if is_padding is not None:
        token_contexts = token_contexts.masked_fill(is_padding, 0)
    positions = token_contexts - 1
    blocks = tables.index_select(0, token_tables + positions // block_tokens)
    slots = blocks * block_tokens + positions % block_tokens
    return PackedBatch(
        cu_seqlens_q=[0, *ends],
        context_lens=list(context_lens),
        table_starts=list(table_starts),
        tables=tables,
        contexts=contexts,
        token_contexts=token_contexts,
        token_tables=token_tables,
        slots=slots if is_padding is None else slots.masked_fill(is_padding, -1),
        block_tokens=block_tokens,
        fresh=fresh,
        tiles=tiles,
    )


def pack(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[list[int]],
    *,
    block_tokens: int,
    device: torch.device,
    tile_tokens: int = 0,
) -> PackedBatch:
    """Packs sequences with tables from the host; the last `query_lens[i]` of `context_lens[i]` tokens are
    computed now, in tiles of `tile_tokens` where one has several. Raises `ValueError` where that is none or
    more than the context, or a table is too short."""
    if not len(query_lens) == len(context_lens) == len(block_tables):
        raise ValueError("query_lens, context_lens and block_tables must have one entry a sequence")
    for query, context, table in zip(query_lens, context_lens, block_tables, strict=True):
        if not 1 <= query <= context:
            raise ValueError(f"a sequence computes {query} tokens of a context of {context}")
        if context > len(table) * block_tokens:
            raise ValueError(
                f"a context of {context} tokens does not fit in {len(table)} blocks of {block_tokens}"
            )
    starts = list(accumulate((len(table) for table in block_tables), initial=0))[: len(block_tables)]
    positions = [context - query for query, context in zip(query_lens, context_lens, strict=True)]

    def placed(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device)

    fresh = tiles = None
    if device.type != "cpu":
        fresh = placed(fresh_entries(starts, positions, query_lens, block_tokens))
    if tile_tokens and max(query_lens, default=1) > 1:
        tiles = placed(tiles_of(query_lens, context_lens, tile_tokens)).view(-1, 2)
    return lay_out(
        query_lens, context_lens, starts, placed(list(chain.from_iterable(block_tables))), placed(starts),
        placed(list(context_lens)), placed(list(query_lens)), block_tokens=block_tokens, fresh=fresh,
        tiles=tiles,
    )  # fmt: skip


def tiles_of(query_lens: Sequence[int], context_lens: Sequence[int], tile_tokens: int) -> list[int]:
    """`PackedBatch.tiles` of at most `tile_tokens` tokens, one after the other: the longest contexts first,
    so that none that takes long begins last."""
    firsts = accumulate(query_lens, initial=0)
    tiles = [
        (-(context - query + place + count), first + place, count)
        for query, context, first in zip(query_lens, context_lens, firsts, strict=False)
        for place in range(0, query, tile_tokens)
        for count in (min(tile_tokens, query - place),)
    ]
    return [number for _, *tile in sorted(tiles) for number in tile]


def fresh_entries(
    table_starts: Sequence[int], positions: Sequence[int], num_tokens: Sequence[int], block_tokens: int
) -> list[int]:
    """Where block tables name a block whose first slot is among a sequence's `num_tokens` from its position;
    `table_starts`: where each table begins."""
    return [
        start + index
        for start, position, count in zip(table_starts, positions, num_tokens, strict=True)
        for index in range(-(-position // block_tokens), -(-(position + count) // block_tokens))
    ]


def array_of(tensor: torch.Tensor) -> Any:
    """A CPU tensor's memory as a numpy array; bfloat16, unknown to numpy, as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
