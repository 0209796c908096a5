"""Paged attention with torch's `scaled_dot_product_attention`. Equal to `kernels.reference`.

Sequences that compute one token (decodes) are gathered whole blocks at a time into padded groups and attended
in one call; prefill chunks go one by one. Tables and masks are built once a step (`PackedBatch.derived`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.batch import PackedBatch
from kernels.reference import causal_mask, dense_attention


@dataclass(slots=True)
class DecodeGroup:
    """Decoding sequences whose tables are of similar length, padded to the longest."""

    rows: torch.Tensor | None
    """`[sequences]` int64: their rows in the packed batch; None: all rows, in order."""
    blocks: torch.Tensor
    """`[sequences * blocks]` int64. Padding repeats a sequence's own first block."""
    sequences: int
    context_lens: torch.Tensor
    """`[sequences, 1]` int64."""


@dataclass(slots=True)
class PrefillChunk:
    """One sequence that computes several tokens."""

    start: int
    end: int
    context_len: int
    blocks: torch.Tensor


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PackedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `kernels.reference.paged_attention`."""
    decodes, chunks = _plan(batch)
    whole = not chunks and len(decodes) == 1 and decodes[0].rows is None
    output = None if whole else query.new_empty(*query.shape[:2], value_cache.shape[-1])
    for number, group in enumerate(decodes):
        rows = query if group.rows is None else query.index_select(0, group.rows)
        keys, values = (
            _gather(key_cache, group.blocks, group.sequences),
            _gather(value_cache, group.blocks, group.sequences),
        )
        attended = _attend_one(
            rows,
            keys,
            values,
            _decode_mask(batch, number, group, keys.shape[2], sliding_window),
            scale,
            softcap,
            sinks,
        )
        if output is None:
            return attended
        if group.rows is None:
            output.copy_(attended)
        else:
            output.index_copy_(0, group.rows, attended)
    assert output is not None
    for chunk in chunks:
        keys = _gather(key_cache, chunk.blocks, 1)[:, :, : chunk.context_len]
        values = _gather(value_cache, chunk.blocks, 1)[:, :, : chunk.context_len]
        attended = _attend_chunk(
            query[chunk.start : chunk.end].transpose(0, 1)[None],
            keys,
            values,
            batch,
            chunk,
            scale,
            sliding_window,
            softcap,
            sinks,
        )
        output[chunk.start : chunk.end] = attended[0].transpose(0, 1)
    return output


def _plan(batch: PackedBatch) -> tuple[list[DecodeGroup], list[PrefillChunk]]:
    """Groups the decodes by the power of two above their number of blocks: padding is less than half."""
    cached: tuple[list[DecodeGroup], list[PrefillChunk]] | None = batch.derived.get("sdpa")
    if cached is not None:
        return cached
    members: dict[int, list[int]] = {}
    chunks: list[PrefillChunk] = []
    for index, context_len in enumerate(batch.context_lens):
        num_blocks = -(-context_len // batch.block_tokens)
        if batch.query_tokens(index) == 1:
            members.setdefault((num_blocks - 1).bit_length(), []).append(index)
        else:
            chunks.append(
                PrefillChunk(
                    start=batch.cu_seqlens_q[index],
                    end=batch.cu_seqlens_q[index + 1],
                    context_len=context_len,
                    blocks=_indices(batch.block_tables[index][:num_blocks], batch.device),
                )
            )
    groups: list[DecodeGroup] = []
    for indices in members.values():
        lens = [batch.context_lens[index] for index in indices]
        width = -(-max(lens) // batch.block_tokens)
        blocks: list[int] = []
        for index, context_len in zip(indices, lens, strict=True):
            used = -(-context_len // batch.block_tokens)
            table = batch.block_tables[index]
            blocks += table[:used]
            blocks += table[:1] * (width - used)
        everything = len(indices) == batch.num_tokens
        groups.append(
            DecodeGroup(
                rows=None if everything else _indices([batch.cu_seqlens_q[i] for i in indices], batch.device),
                blocks=_indices(blocks, batch.device),
                sequences=len(indices),
                context_lens=_indices(lens, batch.device)[:, None],
            )
        )
    batch.derived["sdpa"] = (groups, chunks)
    return groups, chunks


def _indices(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _gather(cache: torch.Tensor, blocks: torch.Tensor, sequences: int) -> torch.Tensor:
    """`[sequences, kv_heads, context, dim]`, strided: SDPA takes it without another copy."""
    gathered = cache.index_select(0, blocks)
    return gathered.view(sequences, -1, *cache.shape[2:]).transpose(1, 2)


def _decode_mask(
    batch: PackedBatch, number: int, group: DecodeGroup, width: int, sliding_window: int | None
) -> torch.Tensor:
    """`[sequences, 1, 1, width]` bool, one for each group and window."""
    key = ("sdpa-decode", number, sliding_window)
    mask: torch.Tensor | None = batch.derived.get(key)
    if mask is None:
        positions = torch.arange(width, device=batch.device)[None, :]
        visible = positions < group.context_lens
        if sliding_window is not None:
            visible = visible & (positions >= group.context_lens - sliding_window)
        mask = batch.derived[key] = visible[:, None, None, :]
    return mask


def _attend_one(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One query a sequence: `rows` `[sequences, heads, dim]` -> `[sequences, heads, value_dim]`. The query
    heads that share a key/value head stand in as its queries, so that it is read once."""
    sequences, heads, dim = rows.shape
    if softcap is None and sinks is None:
        grouped = rows.view(sequences, keys.shape[1], -1, dim)
        attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=visible, scale=scale)
        return attended.reshape(sequences, heads, -1)
    attended = dense_attention(
        rows[:, :, None], keys, values, visible, scale=scale, softcap=softcap, sinks=sinks
    )
    return attended[:, :, 0]


def _attend_chunk(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: PackedBatch,
    chunk: PrefillChunk,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    query_len = chunk.end - chunk.start
    window = sliding_window if sliding_window is not None and sliding_window < chunk.context_len else None
    plain = softcap is None and sinks is None
    if plain and window is None and query_len == chunk.context_len:
        return scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    key = ("sdpa-chunk", query_len, chunk.context_len, window)
    visible: torch.Tensor | None = batch.derived.get(key)
    if visible is None:
        visible = batch.derived[key] = causal_mask(query_len, chunk.context_len, window, batch.device)
    if plain:
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=visible, scale=scale, enable_gqa=True
        )
    return dense_attention(query, keys, values, visible, scale=scale, softcap=softcap, sinks=sinks)
