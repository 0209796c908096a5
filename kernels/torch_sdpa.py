"""Paged attention with torch's `scaled_dot_product_attention`. Equal to `kernels.reference`.

Sequences that compute one token (decodes) are gathered whole blocks at a time into padded groups and attended
in one call; prefill chunks go one by one. Tables and masks are built once a step (`PackedBatch.derived`)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.batch import PackedBatch
from kernels.reference import causal_mask, dense_attention

LARGEST = 64
"""`sort_key` of a sequence that computes several tokens."""


@dataclass(slots=True)
class DecodeGroup:
    """Neighbouring sequences that decode, with tables of similar length, padded to the longest."""

    start: int
    """The first one's row in the packed batch; each has one row."""
    end: int
    blocks: torch.Tensor
    """`[sequences * blocks]` int64. Padding repeats a sequence's own first block."""
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
    output = query.new_empty(*query.shape[:2], value_cache.shape[-1])
    for number, group in enumerate(decodes):
        sequences = group.end - group.start
        keys = _gather(key_cache, group.blocks, sequences)
        values = _gather(value_cache, group.blocks, sequences)
        mask = _decode_mask(batch, number, group, keys.shape[2], sliding_window)
        attended = _attend_one(query[group.start : group.end], keys, values, mask, scale, softcap, sinks)
        if sequences == batch.num_tokens:
            return attended
        output[group.start : group.end] = attended
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
    """Groups neighbouring decodes by the power of two above their number of blocks: padding is less than
    half. Runners put decodes of a size beside each other (`sort_key`)."""
    cached: tuple[list[DecodeGroup], list[PrefillChunk]] | None = batch.derived.get("sdpa")
    if cached is not None:
        return cached
    groups: list[DecodeGroup] = []
    chunks: list[PrefillChunk] = []
    sizes = [
        sort_key(batch.query_tokens(index), context_len, batch.block_tokens)
        for index, context_len in enumerate(batch.context_lens)
    ]
    for size, members in groupby(range(batch.num_sequences), key=sizes.__getitem__):
        indices = list(members)
        if size < LARGEST:
            groups.append(_decode_group(batch, indices[0], indices[-1] + 1))
            continue
        for index in indices:
            start, end = batch.cu_seqlens_q[index : index + 2]
            chunks.append(PrefillChunk(start, end, batch.context_lens[index], batch.table(index)))
    batch.derived["sdpa"] = (groups, chunks)
    return groups, chunks


def sort_key(query_tokens: int, context_len: int, block_tokens: int) -> int:
    """Sequences of one key are attended to together, where they are neighbours; `LARGEST`: alone."""
    return ((context_len - 1) // block_tokens).bit_length() if query_tokens == 1 else LARGEST


def _decode_group(batch: PackedBatch, first: int, end: int) -> DecodeGroup:
    width = -(-max(batch.context_lens[first:end]) // batch.block_tokens)
    start = batch.cu_seqlens_q[first]
    contexts = batch.contexts[first:end, None]
    starts = batch.token_tables[start : start + end - first, None]
    blocks = padded_tables(batch, starts, contexts, width)
    return DecodeGroup(start, start + end - first, blocks, contexts)


def padded_tables(
    batch: PackedBatch, starts: torch.Tensor, contexts: torch.Tensor, width: int
) -> torch.Tensor:
    """`[sequences * width]`: block tables that begin at `starts` `[sequences, 1]`; what follows the blocks of
    `contexts` `[sequences, 1]` tokens repeats the first."""
    entries = torch.arange(width, device=batch.device)[None, :]
    # What follows a sequence's table may be anything, a NaN times a weight of zero included.
    entries = torch.where(entries * batch.block_tokens < contexts, entries, 0)
    return batch.tables.index_select(0, (starts + entries).view(-1))


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
