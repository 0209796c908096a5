"""Paged attention of steps in which every sequence computes one token, in Triton; long contexts are cut."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.configurations import MOST_PARTS, decode_launch, power_of_two
from kernels.gpu.launching import launch
from kernels.gpu.varlen_attention import UNLIMITED, launch_attention, span


@triton.jit
def combine_kernel(
    partial, exponents, contexts, out, window, least, parts, out_row, out_head,
    value_dim: tl.constexpr, value_width: tl.constexpr, keys: tl.constexpr, most: tl.constexpr,
):  # fmt: skip
    """Grid `(heads, rows)`: the parts of a row that has more than one, weighted by their sums."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    context = tl.load(contexts + row).to(tl.int32)
    start, each = span(context - window, context, least, parts, keys)
    if start + each >= context:
        return
    part = tl.arange(0, most)
    is_part = start + part * each < context
    dims = tl.arange(0, value_width)
    place = (row * tl.num_programs(0) + head) * parts + part
    exponent = tl.load(exponents + place, mask=is_part, other=-float("inf"))
    weights = tl.exp2(exponent - tl.max(exponent, 0))
    is_read = is_part[:, None] & (dims < value_dim)[None, :]
    values = tl.load(partial + place[:, None] * value_dim + dims[None, :], mask=is_read, other=0.0)
    combined = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    at = out + row * out_row + head * out_head + dims
    tl.store(at, combined.to(out.dtype.element_ty), mask=dims < value_dim)


def decode_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, tables: Tensor, starts: Tensor, contexts: Tensor,
    out: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None,
) -> None:  # fmt: skip
    """As `kernels.reference.decode_attention`. Rows and heads may lie apart, a head's numbers may not."""
    rows, heads, dim = query.shape
    kv_heads, value_dim = value_cache.shape[2:]
    members, programs = power_of_two(heads // kv_heads, 16), rows * kv_heads
    chosen = decode_launch(programs, max(dim, value_dim), query.dtype)
    parts = chosen.parts(programs)
    partial = exponents = None
    if parts > 1:
        partial = torch.empty(rows, heads, parts, value_dim, dtype=torch.float32, device=query.device)
        exponents = torch.empty(rows, heads, parts, dtype=torch.float32, device=query.device)
    places = (query, key_cache, value_cache, tables, starts, contexts)
    launch_attention(
        chosen, places, None, out, members, members, scale, window, softcap, sinks, partial, exponents, parts
    )
    if parts > 1:
        value_width = power_of_two(value_dim, 16)
        launch(
            combine_kernel, (heads, rows), partial, exponents, contexts, out,
            window or UNLIMITED, chosen.least, parts, *out.stride()[:2], value_dim=value_dim,
            value_width=value_width, keys=chosen.keys, most=MOST_PARTS, num_warps=2 + 2 * (value_width > 128),
        )  # fmt: skip
