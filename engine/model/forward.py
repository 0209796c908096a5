"""`Forward`, the interface of a packed step through the model, and `PlainForward`; the choice of one.

`PlainForward` is transformers' own forward pass with our attention plugged in, for every architecture. Where
`engine.model.cpu.compiled` or `engine.model.gpu.lean` applies, it gives the same logits faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.model.attention import LayerCache, PagedContext, attending
from engine.model.path_report import PathReport
from kernels.batch import PackedBatch
from kernels.dispatch import AttentionKernel


class Forward(Protocol):
    """Computes a step's keys, values and some rows' logits."""

    name: str
    """In reports."""
    tile_tokens: int
    """Tokens of a tile of `PackedBatch.tiles`; 0: it wants none."""
    captures: bool
    """Whether nothing that it launches depends on what the host knows but the shapes: it can be captured."""

    def reserve(self, tokens: int) -> None:
        """From now on steps of up to `tokens` use memory that never moves, for steps that are captured:
        it makes room where that is its own matter."""
        ...

    def __call__(
        self,
        batch: PackedBatch,
        token_ids: torch.Tensor,
        rows: torch.Tensor | None,
        caches: dict[int, LayerCache],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`token_ids` `[tokens]`, one a packed row; returns the logits of `rows` (None: of all): `[rows,
        vocabulary]`, in `out` where that is given (never on a CPU)."""
        ...


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of a forward pass in the check against the plain model."""

    problem: str | None
    """None: its logits equal the plain model's."""
    seconds: float
    """Duration of the check's steps, compilation excluded."""


Check = Callable[[Forward], Checked]


@dataclass(frozen=True, slots=True)
class ForwardChoice:
    """The forward pass that serves, with a report for each path that was considered."""

    forward: Forward
    reports: tuple[PathReport, ...]


class PlainForward:
    name = "plain"

    def __init__(self, model: Any, kernel: AttentionKernel) -> None:
        self._model = model
        self._kernel = kernel
        self.tile_tokens, self.captures = kernel.tile_tokens, kernel.captures

    def reserve(self, tokens: int) -> None:
        pass

    def __call__(
        self,
        batch: PackedBatch,
        token_ids: torch.Tensor,
        rows: torch.Tensor | None,
        caches: dict[int, LayerCache],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        with attending(PagedContext(batch, caches, self._kernel)):
            output = self._model(
                input_ids=token_ids[None],
                position_ids=(batch.token_contexts - 1).clamp(min=0)[None],  # padding: no table has a -1
                use_cache=False,
                logits_to_keep=0 if rows is None else rows,
            )
        logits: torch.Tensor = output.logits[0]
        return logits if out is None else out.copy_(logits)
