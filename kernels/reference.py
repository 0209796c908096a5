"""Reference implementation of paged attention and of the cache write.

Every other kernel is tested against it: one loop over sequences, float32 inside, no optimisation. Below are
the twins of the operators of `kernels.gpu`, which write into the tensors that they are given."""

from __future__ import annotations

from typing import Any

import torch

from kernels import sampling
from kernels.batch import PackedBatch


def write_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: PackedBatch,
) -> None:
    """Writes `key` and `value` (`[tokens, kv_heads, head_dim]`) of a step to the batch's slots. A block that
    begins in this step is cleared first: kernels may read its tail under a mask, and what the block's former
    owner left there (a NaN times a weight of zero is a NaN) must not reach this sequence."""
    if batch.fresh_blocks is not None:
        key_cache.index_fill_(0, batch.fresh_blocks, 0)
        value_cache.index_fill_(0, batch.fresh_blocks, 0)
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, batch.slots, key)
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, batch.slots, value)


def gather_context(cache: torch.Tensor, blocks: torch.Tensor, context_len: int) -> torch.Tensor:
    """The first `context_len` tokens of a sequence out of a paged cache: `[context, kv_heads, head_dim]`."""
    return cache.index_select(0, blocks).reshape(-1, *cache.shape[2:])[:context_len]


def causal_mask(
    query_len: int, context_len: int, sliding_window: int | None, device: torch.device
) -> torch.Tensor:
    """`[query, context]` bool, true where a query may look; queries are the context's last tokens. A window
    of W tokens shows a query itself and the W - 1 tokens before it (as in transformers)."""
    query_positions = torch.arange(context_len - query_len, context_len, device=device)[:, None]
    key_positions = torch.arange(context_len, device=device)[None, :]
    visible = key_positions <= query_positions
    if sliding_window is not None:
        visible = visible & (key_positions > query_positions - sliding_window)
    return visible


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`query` is `[batch, heads, queries, key_dim]`, `key` and `value` are `[batch, kv_heads, context, dim]`,
    the result is `[batch, heads, queries, value_dim]` in `value`'s dtype, computed in float32. `visible` is
    bool and broadcasts to `[batch, heads, queries, context]`. `softcap` squashes the scores to +-softcap
    (Gemma 2). `sinks` holds one logit a head that joins the softmax and carries no value (gpt-oss). Query
    head h uses key/value head `h // (heads / kv_heads)`."""
    group = query.shape[1] // key.shape[1]
    keys = key.float().repeat_interleave(group, dim=1)
    values = value.float().repeat_interleave(group, dim=1)
    scores = torch.matmul(query.float(), keys.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        sink = sinks.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
    return torch.matmul(weights, values).to(value.dtype)


def _sequence_attention(
    query: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], blocks: torch.Tensor, context_len: int,
    window: int | None, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """Of the last tokens of one sequence, `[tokens, heads, key_dim]`; `options` are `dense_attention`'s."""
    visible = causal_mask(query.shape[0], context_len, window, query.device)
    keys, values = (gather_context(cache, blocks, context_len).transpose(0, 1)[None] for cache in caches)
    return dense_attention(query.transpose(0, 1)[None], keys, values, visible, **options)[0].transpose(0, 1)


def paged_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, batch: PackedBatch, *,
    scale: float, sliding_window: int | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of a packed step, whose keys and values the cache holds already: `[tokens, heads, key_dim]`
    to `[tokens, heads, value_dim]`. Options as in `dense_attention` and `causal_mask`."""
    outputs = []
    for index, context_len in enumerate(batch.context_lens):
        tokens = query[batch.cu_seqlens_q[index] : batch.cu_seqlens_q[index + 1]]
        attended = _sequence_attention(
            tokens, (key_cache, value_cache), batch.table(index), context_len, sliding_window,
            scale=scale, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        outputs.append(attended)
    return torch.cat(outputs, dim=0)


def decode_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, tables: torch.Tensor,
    starts: torch.Tensor, contexts: torch.Tensor, out: torch.Tensor, scale: float, window: int,
    softcap: float, sinks: torch.Tensor | None,
) -> None:  # fmt: skip
    """Each token of `query` `[tokens, heads, key_dim]` attends to the first `contexts` `[tokens]` tokens of
    its sequence, whose blocks stand in `tables` from `starts` `[tokens]` on; `out` `[tokens, heads,
    value_dim]`. 0 for `window` or `softcap`: none. Where the context is 0, `out` is 0."""
    block_tokens = key_cache.shape[1]
    out.zero_()
    for row, (start, context) in enumerate(zip(starts.tolist(), contexts.tolist(), strict=True)):
        if not context:
            continue
        blocks = tables[start : start - (-context // block_tokens)]
        out[row : row + 1] = _sequence_attention(
            query[row : row + 1], (key_cache, value_cache), blocks, context, window or None,
            scale=scale, softcap=softcap or None, sinks=sinks,
        )  # fmt: skip


def varlen_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, tables: torch.Tensor,
    starts: torch.Tensor, contexts: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor, scale: float,
    window: int, softcap: float, sinks: torch.Tensor | None,
) -> None:  # fmt: skip
    """As `decode_attention`, for the tokens of `tiles` `[tiles, 2]`: the first one's row and how many, which
    follow one another in one sequence; 0: none. Rows in no tile are not written."""
    tokens = [first + place for first, count in tiles.tolist() for place in range(count)]
    rows = torch.tensor(tokens, dtype=torch.int64)
    part = out[rows]
    decode_attention(
        query[rows], key_cache, value_cache, tables, starts[rows], contexts[rows], part, scale, window,
        softcap, sinks,
    )  # fmt: skip
    out[rows] = part


def rotary_write(
    qkv: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, cosines: torch.Tensor,
    sines: torch.Tensor, contexts: torch.Tensor, slots: torch.Tensor, query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None, epsilon: float,
) -> None:  # fmt: skip
    """Rotates the queries of `qkv` `[tokens, (heads + 2 kv_heads) dim]` where they lie, and writes its
    rotated keys and its values to `slots` `[tokens]` of the caches; -1: to none. A token's position is its
    context less one; `cosines` and `sines` `[positions, dim / 2]` are float32. `query_norm`, `key_norm`
    `[dim]`: weights of an RMSNorm of each head before that."""
    kv_heads, dim = key_cache.shape[2:]
    is_token = slots >= 0
    heads = qkv[is_token].unflatten(1, (-1, dim))
    query, key, value = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    positions = contexts[is_token] - 1
    turned = []
    for part, weight in ((query, query_norm), (key, key_norm)):
        if weight is not None:
            part = rms_norm(part, weight, epsilon)
        one, other = part.float().chunk(2, dim=-1)
        cosine, sine = cosines[positions][:, None], sines[positions][:, None]
        rotated = (one * cosine - other * sine, other * cosine + one * sine)
        turned.append(torch.cat(rotated, dim=-1).to(part.dtype))
    qkv[is_token, : query.shape[1] * dim] = turned[0].flatten(1)
    write_slots(turned[1], value, key_cache, value_cache, slots[is_token])


def write_slots(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:  # fmt: skip
    """Writes `key` and `value` `[tokens, kv_heads, dim]` to `slots` `[tokens]` of the caches; -1: to none."""
    is_token = slots >= 0
    for cache, part in ((key_cache, key), (value_cache, value)):
        cache.view(-1, *cache.shape[2:])[slots[is_token]] = part[is_token]


def rms_norm(values: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As Llama has it: normalised in float32, weighted in the dtype of `values`."""
    whole = values.float()
    normed = whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + epsilon)
    return normed.to(values.dtype) * weight


def add_norm(
    delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor,
    epsilon: float,
) -> None:  # fmt: skip
    """Adds `delta` to `residual` `[tokens, width]`, then writes its RMSNorm to `out`."""
    if delta is not None:
        residual += delta
    out.copy_(rms_norm(residual, weight, epsilon))


def silu_multiply(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """`gate_up` `[tokens, 2 width]` to `out` `[tokens, width]`: SiLU of the first half times the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
    min_p: torch.Tensor, seeds: torch.Tensor, token_index: torch.Tensor, fallback: int,
    token_ids: torch.Tensor, unsound: torch.Tensor,
) -> None:  # fmt: skip
    """Writes the tokens drawn from `logits` `[rows, vocabulary]` to `token_ids` `[rows]` (int64), and whether
    a row was not finite to `unsound` `[rows]` (bool). The others are as in `sampling.Draws`, `fallback` as in
    `sampling.repaired`."""
    scores, seen = sampling.repaired(logits.float(), fallback)
    unsound.copy_(seen)
    rows = sampling.Draws(temperature, top_k, top_p, min_p, seeds, token_index)
    token_ids.copy_(sampling.draw(scores, rows))
