"""Reference implementation of paged attention and of the cache write.

Every other kernel is tested against it: one loop over sequences, float32 inside, no optimisation."""

from __future__ import annotations

import torch

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
    """Attention of a packed step, whose keys and values the cache holds already: `[tokens, heads, key_dim]`
    to `[tokens, heads, value_dim]`. Options as in `dense_attention` and `causal_mask`."""
    outputs = []
    for index, context_len in enumerate(batch.context_lens):
        start, end = batch.cu_seqlens_q[index], batch.cu_seqlens_q[index + 1]
        table = batch.table(index)
        attended = dense_attention(
            query[start:end].transpose(0, 1)[None],
            gather_context(key_cache, table, context_len).transpose(0, 1)[None],
            gather_context(value_cache, table, context_len).transpose(0, 1)[None],
            causal_mask(end - start, context_len, sliding_window, query.device),
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs, dim=0)
