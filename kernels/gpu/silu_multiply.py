"""Triton kernel: SiLU of the gate times the other half of a merged product."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launching import launch

CONFIGURATION = {"part": 1024, "num_warps": 4}


@triton.jit
def silu_multiply_kernel(gate_up, out, stride_token, out_token, width, part: tl.constexpr):
    """Grid `(tokens, parts of the width)`."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * part + tl.arange(0, part)
    lies = gate_up + token * stride_token + place
    gate = tl.load(lies, mask=place < width, other=0.0)
    up = tl.load(lies + width, mask=place < width, other=0.0)
    value = gate.to(tl.float32)
    power = tl.exp(-tl.abs(value))  # at most 1
    silu = (value * tl.where(value < 0, power, 1.0) / (1.0 + power)).to(gate.dtype)
    product = (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out + token * out_token + place, product, mask=place < width)


def silu_multiply(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """As `kernels.reference.silu_multiply`; the last dimension of each is contiguous."""
    tokens, width = out.shape
    grid = (tokens, triton.cdiv(width, CONFIGURATION["part"]))
    launch(silu_multiply_kernel, grid, gate_up, out, gate_up.stride(0), out.stride(0), width, **CONFIGURATION)
