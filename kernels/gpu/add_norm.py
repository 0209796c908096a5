"""Triton kernel: the residual's addition and its RMSNorm."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launching import launch

MOST_WIDTHS_WARPS = ((2048, 4), (8192, 8), (1 << 30, 16))
"""Warps of a row, by its width at most."""


@triton.jit
def add_norm_kernel(
    delta, residual, weight, out, epsilon, delta_row, residual_row, out_row, width, padded: tl.constexpr
):
    """Grid `(tokens,)`."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, padded)
    there = place < width
    total = tl.load(residual + row * residual_row + place, mask=there, other=0.0)
    if delta is not None:
        added = tl.load(delta + row * delta_row + place, mask=there, other=0.0)
        total = (total.to(tl.float32) + added.to(tl.float32)).to(total.dtype)
        tl.store(residual + row * residual_row + place, total, mask=there)
    whole = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(whole * whole, 0) / width + epsilon)
    normed = (whole * scale).to(total.dtype).to(tl.float32)
    weighted = normed * tl.load(weight + place, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + place, weighted.to(out.dtype.element_ty), mask=there)


def add_norm(
    delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor,
    epsilon: float,
) -> None:  # fmt: skip
    """As `kernels.reference.add_norm`; the last dimension of each is contiguous."""
    tokens, width = residual.shape
    warps = next(warps for most, warps in MOST_WIDTHS_WARPS if width <= most)
    strides = (0 if delta is None else delta.stride(0), residual.stride(0), out.stride(0))
    launch(
        add_norm_kernel, (tokens,), delta, residual, weight, out, epsilon, *strides, width,
        padded=triton.next_power_of_2(width), num_warps=warps,
    )  # fmt: skip
