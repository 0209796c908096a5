"""What a step tells the device: `Staging`, its way there, and `StagedStep`, how it then lies there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.messages import SamplingParams
from engine.model.sampler import Wants
from kernels.batch import PackedBatch

STAGING_BUFFERS = 3
"""A buffer is written again when the step that reads it is over: two steps in flight, and the next."""
FIRST_STAGING_ENTRIES = 4096


@dataclass(slots=True)
class StagedStep:
    """A step as the device needs it. Tensors are int64, on the device."""

    batch: PackedBatch
    token_ids: Tensor
    """`[tokens]`: what is fed."""
    rows: Tensor
    """`[choosing]`: rows of the sequences that choose a token."""
    contexts: Tensor
    """`[choosing]`: their tokens, with those of this step."""
    last: Tensor | None
    """`[choosing]`: their last rows in the batch; None: every row of the batch chooses."""
    sampling: list[SamplingParams]
    wants: Wants


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What a captured step is padded to, in entries of each part."""

    tokens: int
    sequences: int
    choosing: int
    changes: int
    """Of block tables."""
    tiles: int = 0
    is_mixed: bool = False
    """Otherwise each sequence computes and chooses one token."""

    def sizes(self) -> dict[str, int]:
        """Of the parts that are staged."""
        sizes = {
            "rows": self.sequences, "fed": self.tokens, "entries": self.changes, "blocks": self.changes
        }  # fmt: skip
        if self.is_mixed:
            sizes |= {"queries": self.sequences, "indices": self.choosing, "last": self.choosing}
            sizes["tiles"] = 2 * self.tiles
        return sizes


class Staging:
    """Integers on their way to the device: parts of one buffer, and one copy."""

    def __init__(self, device: torch.device, entries: int = FIRST_STAGING_ENTRIES) -> None:
        self._device = device
        self.target = torch.empty(0, dtype=torch.int64)
        """Where they lie on the device; does not move while what is sent fits."""
        self._turn = 0
        self._allocate(entries)

    def _allocate(self, entries: int) -> None:
        pinned = self._device.type == "cuda"
        if self._device.type != "cpu":
            self.target = torch.empty(entries, dtype=torch.int64, device=self._device)
        self._buffers = [
            torch.empty(entries, dtype=torch.int64, pin_memory=pinned) for _ in range(STAGING_BUFFERS)
        ]

    def send(self, parts: Iterable[Sequence[int] | np.ndarray]) -> list[Tensor]:
        """Copies all parts to the device; returns them there."""
        arrays = [np.asarray(part, dtype=np.int64).reshape(-1) for part in parts]
        sizes = [len(array) for array in arrays]
        total = sum(sizes)
        if total > len(self._buffers[0]):
            # The former buffers live until the copies that read them are done: torch sees to that.
            self._allocate(2 * total)
        self._turn = (self._turn + 1) % STAGING_BUFFERS
        host = self._buffers[self._turn][:total]
        if total:
            np.concatenate(arrays, out=host.numpy())
        if self._device.type != "cpu":
            target = self.target[:total]
            target.copy_(host, non_blocking=True)
            host = target
        return list(host.split(sizes))


def on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, there once the step's last event is; on a CPU the tensor itself."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    host.copy_(tensor, non_blocking=True)
    return host
