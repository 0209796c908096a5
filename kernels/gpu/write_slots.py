"""Triton kernel: keys or values of a step go to their slots of the paged cache."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launching import launch


@triton.jit
def write_slots_kernel(
    part, cache, slots, stride_token, stride_head, stride_slot, heads, dim: tl.constexpr,
    padded: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Grid `(tokens,)`."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        head, place = tl.arange(0, padded)[:, None], tl.arange(0, width)[None, :]
        there = (head < heads) & (place < dim)
        values = tl.load(part + token * stride_token + head * stride_head + place, mask=there)
        tl.store(cache + slot * stride_slot + head * dim + place, values, mask=there)


def write_slots(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:  # fmt: skip
    """As `kernels.reference.write_slots`; the last dimension of `key` and `value` is contiguous, the caches
    are as a whole."""
    for part, cache in ((key, key_cache), (value, value_cache)):
        heads, dim = part.shape[1:]
        launch(
            write_slots_kernel, (len(slots),), part, cache, slots, *part.stride()[:2], cache.stride(1), heads,
            dim=dim, padded=triton.next_power_of_2(heads), width=triton.next_power_of_2(dim), num_warps=4,
        )  # fmt: skip
