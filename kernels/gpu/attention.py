"""Paged attention and cache write of a packed step by our Triton kernels, as `kernels.reference` has them."""

from __future__ import annotations

import torch

from kernels.batch import PackedBatch
from kernels.gpu import operators  # noqa: F401  (registers torch.ops.fairgate)


def write_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: PackedBatch,
) -> None:
    """As `kernels.reference.write_kv`; clears nothing, as no kernel reads what is not written."""
    torch.ops.fairgate.write_slots(key, value, key_cache, value_cache, batch.slots)


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `kernels.reference.paged_attention`; `out` `[tokens, heads, value_dim]`, where given, is written and
    returned."""
    if out is None:
        out = query.new_empty(*query.shape[:2], value_cache.shape[-1])
    places = (query, key_cache, value_cache, batch.tables, batch.token_tables, batch.token_contexts)
    options = (out, scale, sliding_window or 0, softcap or 0.0, sinks)
    if batch.tiles is None:
        torch.ops.fairgate.decode_attention(*places, *options)
    else:
        torch.ops.fairgate.varlen_attention(*places, batch.tiles, *options)
    return out
