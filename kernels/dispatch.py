"""Choice of the attention kernel: by what each one serves, and by a trial.

Made once, when a model is loaded; reported in the engine's `ModelInfo`, with what was passed over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kernels import flash_attention, reference, torch_sdpa
from kernels.cpu import jit
from kernels.gpu import attention as gpu_attention
from kernels.gpu.configurations import tile_tokens
from kernels.machine import AttentionNeeds, KernelMachine, LayerNeeds

Attend = Callable[..., torch.Tensor]
"""Signature and meaning of `kernels.reference.paged_attention`."""
WriteKv = Callable[..., None]
"""Signature and meaning of `kernels.reference.write_kv`."""
NUMBA, TRITON, FLASH_ATTN = "numba", "triton", "flash-attn"
LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    name: str
    reason: str
    """Why it is chosen; in `KERNELS`, with `{dtype}` and `{machine}` to fill in."""
    attend: Attend
    write_kv: WriteKv
    tile_tokens: int = 0
    """Tokens of a tile of `PackedBatch.tiles`; 0: it takes none."""
    captures: bool = False
    """Whether its launches depend on nothing that the host knows but the shapes."""
    why_not: Callable[[KernelMachine, AttentionNeeds], str | None] = lambda machine, needs: None
    """Why it cannot serve these needs on this machine; None: it can."""


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    kernel: AttentionKernel
    passed_over: tuple[tuple[str, str], ...]
    """Name and reason of each kernel that is preferred to the chosen one and cannot be had."""


def _numba(machine: KernelMachine, needs: AttentionNeeds) -> str | None:
    if jit.MISSING is None and machine.kind != "cpu":
        return f"it runs on a CPU, not on {machine.kind}"
    if jit.MISSING is None and needs.dtype == torch.float16:
        return "it computes float32 and bfloat16, not float16"
    return jit.MISSING


def _on_card(machine: KernelMachine, missing: str | None, needs: AttentionNeeds) -> str | None:
    if machine.kind == "cuda" and (machine.capability or LEAST_CAPABILITY) < LEAST_CAPABILITY:
        return f"it needs compute capability 8.0 or newer, {machine} has less"
    widest = max((max(layer.key_dim, layer.value_dim) for layer in needs.layers), default=0)
    return missing or (f"it serves heads of up to 256 dims, not of {widest}" if widest > 256 else None)


def _triton(machine: KernelMachine, needs: AttentionNeeds) -> str | None:
    return _on_card(machine, machine.triton, needs)


def _flash_attn(machine: KernelMachine, needs: AttentionNeeds) -> str | None:
    if unfit := _on_card(machine, machine.flash_attn, needs):
        return unfit
    if needs.dtype == torch.float32:
        return "it computes float16 and bfloat16, not float32"
    if needs.block_tokens % 256:
        return f"its blocks have 256 tokens, not {needs.block_tokens}: set engine.block_tokens to 256"
    for layer in needs.layers:
        if layer.sinks or layer.key_dim != layer.value_dim or layer.key_dim % 8:
            return f"it serves no sinks, and keys as wide as values, by 8 dims: not {layer}"
    return None


_numba_parts: tuple[Attend, WriteKv] = (torch_sdpa.paged_attention, reference.write_kv)
if jit.MISSING is None:
    from kernels.cpu import attention as numba_attention

    _numba_parts = (numba_attention.paged_attention, numba_attention.write_kv)
_gpu_parts = (gpu_attention.paged_attention, gpu_attention.write_kv)
_ours = "our kernels, compiled for {machine}; none of their figures is measured yet"
_fused = "compiled for this CPU, reads {dtype} keys where they lie"
_torchs = "the fastest kernel for {dtype} on {machine} in torch"
_kernels = (
    AttentionKernel(FLASH_ATTN, "", flash_attention.paged_attention, reference.write_kv, why_not=_flash_attn),
    AttentionKernel(TRITON, _ours, *_gpu_parts, captures=True, why_not=_triton),
    AttentionKernel(NUMBA, _fused, *_numba_parts, why_not=_numba),
    AttentionKernel("torch-sdpa", _torchs, torch_sdpa.paged_attention, reference.write_kv),
    AttentionKernel("reference", "the plainest one, slow", reference.paged_attention, reference.write_kv),
)
KERNELS = {kernel.name: kernel for kernel in _kernels}
"""By preference; the last two run on every device and in every dtype torch has."""

Trial = Callable[[AttentionKernel], str | None]
"""Why a kernel is wrong here; None: it is not. `kernels.trial.try_on` is one."""


def choose_attention(
    machine: KernelMachine, needs: AttentionNeeds, trial: Trial, *, name: str | None = None
) -> AttentionChoice:
    """The first kernel that serves `needs` and passes `trial`, or the one called `name`. Raises `ValueError`
    if that is unknown or cannot run here, or if none can."""
    if name is not None and name not in KERNELS:
        raise ValueError(f"attention kernel {name!r} is not known; known are {', '.join(KERNELS)}")
    passed_over: list[tuple[str, str]] = []
    dtype = str(needs.dtype).removeprefix("torch.")
    for kernel in KERNELS.values() if name is None else [KERNELS[name]]:
        problem = kernel.why_not(machine, needs)
        if problem is None and name is None and kernel.name == FLASH_ATTN:
            problem = "taken by name only (engine.attention=flash-attn): no card has shown that it is faster"
        if problem is None:
            reason = "chosen by name" if name else kernel.reason.format(dtype=dtype, machine=machine)
            kernel = replace(kernel, reason=reason, tile_tokens=_tile_tokens(kernel, needs))
            problem = trial(kernel)
        if problem is None:
            return AttentionChoice(kernel, tuple(passed_over))
        passed_over.append((kernel.name, problem))
    name, problem = passed_over[-1]
    raise ValueError(
        f"attention kernel {name!r} cannot run: {problem} (engine.attention=auto takes the best that can)"
    )


def _tile_tokens(kernel: AttentionKernel, needs: AttentionNeeds) -> int:
    if kernel.name != TRITON:
        return 0
    layers = needs.layers or (LayerNeeds(1, 1, 64, 64),)
    return min(tile_tokens(each.heads // each.kv_heads, max(each.key_dim, each.value_dim)) for each in layers)
