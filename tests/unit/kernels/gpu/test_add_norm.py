"""The residual's addition and norm equal their twin in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels import reference

pytest.importorskip("triton", reason="Triton's kernels need triton")
from kernels.gpu import add_norm

WIDTHS = (1, 33, 2049)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 0.0, torch.bfloat16: 3e-2}
"""Triton's interpreter cuts bfloat16 off where a GPU rounds."""


def some(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("adds", [False, True])
def test_addition_and_norm_are_the_twins(width: int, adds: bool, dtype: torch.dtype) -> None:
    """In float16 to the bit: rounded at the same places. A row of NaN stays alone."""
    tokens, weight = 4, some(width, seed=1, dtype=dtype)
    delta = some(tokens, width + 3, seed=2, dtype=dtype)[:, :width] if adds else None
    start = some(tokens, width, seed=3, dtype=dtype)
    start[1] = float("nan")
    results = []
    for add in (reference.add_norm, add_norm.add_norm):
        residual, out = start.clone(), torch.full((tokens, width + 2), 7.0, dtype=dtype)
        add(delta, residual, weight, out[:, :width], 1e-5)
        results.append((residual, out))
    tolerance = TOLERANCE[dtype]
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance, equal_nan=True)
