"""Rotation, its cache write and the plain one equal their twins in Triton's interpreter."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kernels import reference

pytest.importorskip("triton", reason="Triton's kernels need triton")
from kernels.gpu import rotary_write, write_slots

NOTHING = float("nan")
POSITIONS = 40
SHAPES = [
    (kv_heads * ratio, kv_heads, dim, block)
    for (ratio, dim), (kv_heads, block) in zip(
        product((1, 3, 4, 8), (32, 64, 128, 256)), [(1, 16), (2, 256), (3, 16), (2, 16)] * 4, strict=True
    )
]
ODD = [(3, 1, 24, 16), (10, 5, 80, 16), (7, 7, 2, 256)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}
"""Triton's interpreter cuts bfloat16 off where a GPU rounds."""


def some(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def slots_of(tokens: int, block: int) -> torch.Tensor:
    """Scattered over six blocks; two tokens are padding."""
    slots = torch.randperm(6 * block, generator=torch.Generator().manual_seed(tokens))[:tokens]
    slots[1], slots[-1] = -1, -1
    return slots


def check(
    heads: int, kv_heads: int, dim: int, block: int, dtype: torch.dtype, norms: tuple[bool, bool]
) -> None:
    tokens, width = 6, (heads + 2 * kv_heads) * dim
    slots = slots_of(tokens, block)
    contexts = torch.where(slots < 0, 0, torch.tensor([1, 0, POSITIONS, 9, 17, 0]))
    merged = some(tokens, width + 8, seed=dim, dtype=dtype)
    # Before each table and cache lies what padding would be read from and written to.
    angles = torch.outer(torch.arange(-1.0, POSITIONS), 100.0 ** -(torch.arange(0, dim, 2) / dim))
    weights = [some(dim, seed=2 + place, dtype=dtype) if norm else None for place, norm in enumerate(norms)]
    tables, results = (angles.cos()[1:], angles.sin()[1:]), []
    for rotate in (reference.rotary_write, rotary_write.rotary_write):
        qkv = merged.clone()[:, :width]  # rows do not follow one another
        caches = [torch.full((7, block, kv_heads, dim), NOTHING, dtype=dtype) for _ in range(2)]
        rotate(qkv, *[cache[1:] for cache in caches], *tables, contexts, slots, *weights, 1e-5)
        results.append([qkv[:, : heads * dim], *caches])
    for expected, got in zip(*results, strict=True):
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert int(results[1][1].isnan().logical_not().any(-1).any(-1).sum()) == tokens - 2


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block"), [*SHAPES[1::6], *ODD])
def test_rotation_is_the_twins(heads: int, kv_heads: int, dim: int, block: int) -> None:
    check(heads, kv_heads, dim, block, torch.float16, (True, True))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norms", [(True, False), (False, True), (False, False)])
def test_only_what_has_a_norm_is_normalised(norms: tuple[bool, bool], dtype: torch.dtype) -> None:
    check(6, 2, 48, 16, dtype, norms)


@pytest.mark.long
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block"), SHAPES)
def test_rotation_of_every_shape(
    heads: int, kv_heads: int, dim: int, block: int, norm: bool, dtype: torch.dtype
) -> None:
    check(heads, kv_heads, dim, block, dtype, (norm, norm))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("kv_heads", "dims", "block"), [(1, (32, 32), 16), (3, (24, 7), 16), (8, (128, 128), 256)]
)
def test_a_write_is_the_twins(kv_heads: int, dims: tuple[int, int], block: int, dtype: torch.dtype) -> None:
    """Heads lie before tokens, as in transformers."""
    slots, results = slots_of(5, block), []
    parts = [some(kv_heads, 5, dim + 3, seed=dim, dtype=dtype)[..., :dim].transpose(0, 1) for dim in dims]
    for write in (reference.write_slots, write_slots.write_slots):
        caches = [torch.full((7, block, kv_heads, dim), NOTHING, dtype=dtype) for dim in dims]
        write(*parts, *[cache[1:] for cache in caches], slots)
        results.append(caches)
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=0, rtol=0, equal_nan=True)
        assert int(got.isnan().logical_not().any(-1).any(-1).sum()) == 3
