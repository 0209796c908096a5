"""Which attention kernel runs here, and why?

Picked once, when an engine starts; the answer goes into the engine's `ModelInfo`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels import reference, torch_sdpa

Attend = Callable[..., torch.Tensor]
"""Signature and meaning of `kernels.reference.paged_attention`."""
WriteKv = Callable[..., None]
"""Signature and meaning of `kernels.reference.write_kv`."""


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """A kernel that was picked."""

    name: str
    reason: str
    attend: Attend
    write_kv: WriteKv


KERNELS: dict[str, tuple[Attend, WriteKv]] = {
    "torch-sdpa": (torch_sdpa.paged_attention, reference.write_kv),
    "reference": (reference.paged_attention, reference.write_kv),
}
"""By preference; every one runs on every device torch has."""


def pick_attention(device: torch.device, dtype: torch.dtype, *, name: str | None = None) -> AttentionKernel:
    """The best kernel for `device` and `dtype`, or the one called `name`.

    Raises `ValueError` for an unknown name.
    """
    if name is None:
        name = next(iter(KERNELS))
        dtype_name = str(dtype).removeprefix("torch.")
        reason = f"the fastest kernel for {dtype_name} on {device.type} that needs nothing but torch"
    elif name in KERNELS:
        reason = "chosen by name"
    else:
        raise ValueError(f"attention kernel {name!r} is not known; known are {', '.join(KERNELS)}")
    attend, write_kv = KERNELS[name]
    return AttentionKernel(name=name, reason=reason, attend=attend, write_kv=write_kv)
