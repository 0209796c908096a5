"""Paged attention by the package flash-attn 2.8, over the same cache, with blocks of 256 tokens."""

from __future__ import annotations

from typing import Any

import torch

from kernels.batch import PackedBatch
from kernels.torch_sdpa import padded_tables


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PackedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: None = None,
) -> torch.Tensor:
    """As `kernels.reference.paged_attention`, in half precision."""
    import flash_attn  # optional, and for a GPU only

    if "flash-attn" not in batch.derived:
        batch.derived["flash-attn"] = _places(batch)
    function, places = batch.derived["flash-attn"]
    attended: torch.Tensor = getattr(flash_attn, function)(
        query if batch.num_tokens > batch.num_sequences else query[:, None],
        key_cache,
        value_cache,
        **places,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        softcap=softcap or 0.0,
    )
    return attended.view(query.shape)


def _places(batch: PackedBatch) -> tuple[str, dict[str, Any]]:
    """The function for this step's sequences, and where they are, as it takes it: int32."""
    most_context, lengths = max(batch.context_lens), batch.contexts.int()
    width, starts = -(-most_context // batch.block_tokens), batch.token_tables
    places: dict[str, Any] = {"cache_seqlens": lengths}
    if batch.num_tokens > batch.num_sequences:
        ends = torch.tensor(batch.cu_seqlens_q, dtype=torch.int32).to(batch.device, non_blocking=True)
        starts = starts.index_select(0, ends[:-1])
        places = {
            "cu_seqlens_q": ends,
            "cu_seqlens_k": torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
            "max_seqlen_q": max(map(batch.query_tokens, range(batch.num_sequences))),
            "max_seqlen_k": most_context,
        }
    blocks = padded_tables(batch, starts[:, None], batch.contexts[:, None], width)
    function = "flash_attn_with_kvcache" if "cache_seqlens" in places else "flash_attn_varlen_func"
    return function, places | {"block_table": blocks.view(-1, width).int()}
