"""Choice of the attention kernel for a device and dtype.

Made once, when an engine starts; reported in the engine's `ModelInfo`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels import reference, torch_sdpa
from kernels.cpu import jit

Attend = Callable[..., torch.Tensor]
"""Signature and meaning of `kernels.reference.paged_attention`."""
WriteKv = Callable[..., None]
"""Signature and meaning of `kernels.reference.write_kv`."""


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    name: str
    reason: str
    attend: Attend
    write_kv: WriteKv


KERNELS: dict[str, tuple[Attend, WriteKv]] = {
    "torch-sdpa": (torch_sdpa.paged_attention, reference.write_kv),
    "reference": (reference.paged_attention, reference.write_kv),
}
"""By preference; the last two run on every device and in every dtype torch has."""
NUMBA = "numba"
if jit.MISSING is None:
    from kernels.cpu import attention as numba_attention

    KERNELS = {NUMBA: (numba_attention.paged_attention, numba_attention.write_kv), **KERNELS}


def why_not_numba(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the compiled kernel cannot run; None: it can."""
    if jit.MISSING is not None:
        return jit.MISSING
    if device.type != "cpu":
        return f"it runs on a CPU, not on {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it computes float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    return None


def pick_attention(device: torch.device, dtype: torch.dtype, *, name: str | None = None) -> AttentionKernel:
    """The best kernel, or the one called `name`. Raises `ValueError` if that is unknown or unusable here."""
    unfit = why_not_numba(device, dtype)
    if name is None:
        dtype_name = str(dtype).removeprefix("torch.")
        if unfit is None:
            name, reason = NUMBA, f"compiled for this CPU, reads {dtype_name} keys where they lie"
        else:
            name, reason = "torch-sdpa", f"the fastest kernel for {dtype_name} on {device.type} in torch"
    elif name == NUMBA and unfit is not None:
        raise ValueError(f"attention kernel {NUMBA!r} cannot run: {unfit}")
    elif name in KERNELS:
        reason = "chosen by name"
    else:
        raise ValueError(f"attention kernel {name!r} is not known; known are {', '.join(KERNELS)}")
    attend, write_kv = KERNELS[name]
    return AttentionKernel(name=name, reason=reason, attend=attend, write_kv=write_kv)
