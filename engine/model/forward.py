"""`Forward`, the interface of a packed step through the model, and `PlainForward`.

`PlainForward` is transformers' own forward pass with our attention plugged in, for every architecture. Where
`engine.model.cpu.compiled` applies, it gives the same logits faster.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from engine.model.attention import LayerCache, PagedContext, attending
from kernels.batch import PackedBatch
from kernels.dispatch import AttentionKernel


class Forward(Protocol):
    """Computes a step's keys, values and some rows' logits."""

    def __call__(
        self,
        batch: PackedBatch,
        token_ids: torch.Tensor,
        rows: torch.Tensor | None,
        caches: dict[int, LayerCache],
    ) -> torch.Tensor:
        """`token_ids` `[tokens]`, one a packed row; returns the logits of `rows` (None: of all): `[rows,
        vocabulary]`."""
        ...


class PlainForward:
    def __init__(self, model: Any, kernel: AttentionKernel) -> None:
        self._model = model
        self._kernel = kernel

    def __call__(
        self,
        batch: PackedBatch,
        token_ids: torch.Tensor,
        rows: torch.Tensor | None,
        caches: dict[int, LayerCache],
    ) -> torch.Tensor:
        with attending(PagedContext(batch, caches, self._kernel)):
            output = self._model(
                input_ids=token_ids[None],
                position_ids=(batch.token_contexts - 1)[None],
                use_cache=False,
                logits_to_keep=0 if rows is None else rows,
            )
        logits: torch.Tensor = output.logits[0]
        return logits
