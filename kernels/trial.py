"""The trial of an attention kernel: three small ragged steps beside the reference, on the model's device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from kernels import reference
from kernels.batch import pack
from kernels.dispatch import AttentionChoice, AttentionKernel, choose_attention
from kernels.machine import AttentionNeeds, KernelMachine, LayerNeeds, first_line, machine_of

TOLERANCE: dict[torch.dtype, float] = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Relative Euclidean difference of a row that rounding explains."""
WINDOW, SOFTCAP = 11, 5.0
"""In place of larger ones, so that a kernel that forgets them is found out."""


def choose_for(
    needs: AttentionNeeds,
    device: torch.device,
    *,
    name: str | None = None,
    machine: KernelMachine | None = None,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> AttentionChoice:
    """`choose_attention` with this trial, on the machine of `device` if no other is given. `refused`: what
    fails it unseen, by name, with the reason."""

    def trial(kernel: AttentionKernel) -> str | None:
        return refused.get(kernel.name) or try_on(kernel, needs, device)

    with torch.inference_mode():
        return choose_attention(machine or machine_of(device), needs, trial, name=name)


def try_on(kernel: AttentionKernel, needs: AttentionNeeds, device: torch.device) -> str | None:
    """Why `kernel` does not serve `needs` on `device`; None: it gives what the reference gives."""
    for layer in needs.layers:
        try:
            difference = _difference(kernel, layer, needs, device)
        except Exception as error:
            return f"it does not run here: {first_line(error)}"
        if not difference <= TOLERANCE[needs.dtype]:  # a NaN is not
            return f"it differs from the reference by {difference:.1e} ({layer})"
    return None


def _difference(
    kernel: AttentionKernel, layer: LayerNeeds, needs: AttentionNeeds, device: torch.device
) -> float:
    """The largest of a row, in steps of whole prompts, a chunk and decodes whose contexts cross a block's
    edge. What was not written is NaN."""
    size, dims = needs.block_tokens, (layer.key_dim, layer.value_dim)
    steps = ([size + 3, 2], [1, 9, size], [1, 1, 1])
    per_sequence = -(-max(size + 5, 12) // size)
    tables = [list(range(1 + index, 1 + 3 * per_sequence, 3))[::-1] for index in range(3)]
    generator, contexts = torch.Generator().manual_seed(0), [0, 0, 0]
    differences: list[torch.Tensor] = []

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(needs.dtype).to(device)

    def unwritten(dim: int) -> torch.Tensor:
        places = (1 + 3 * per_sequence, size, layer.kv_heads, dim)
        return torch.full(places, math.nan, dtype=needs.dtype).to(device)

    caches = unwritten(layer.key_dim), unwritten(layer.value_dim)
    expected_caches = caches[0].clone(), caches[1].clone()
    options: dict[str, Any] = {
        "scale": layer.key_dim**-0.5,
        "sliding_window": layer.window and min(layer.window, WINDOW),
        "softcap": layer.softcap and min(layer.softcap, SOFTCAP),
        "sinks": random(layer.heads) if layer.sinks else None,
    }
    for queries in steps:
        count, tokens = len(queries), sum(queries)
        contexts = [had + new for had, new in zip(contexts, [*queries, 0], strict=False)]
        batch = pack(
            queries, contexts[:count], tables[:count], block_tokens=size, device=device,
            tile_tokens=kernel.tile_tokens,
        )  # fmt: skip
        query = 4 * random(tokens, layer.heads, layer.key_dim)  # sharp: a wrong token shows
        key, value = (random(tokens, layer.kv_heads, dim) for dim in dims)
        kernel.write_kv(*caches, key, value, batch)
        reference.write_kv(*expected_caches, key, value, batch)
        got = kernel.attend(query, *caches, batch, **options).float().cpu().flatten(1)
        expected = reference.paged_attention(query, *expected_caches, batch, **options)
        expected = expected.float().cpu().flatten(1)
        differences.append((got - expected).norm(dim=1) / expected.norm(dim=1))
    return float(torch.cat(differences).max())
