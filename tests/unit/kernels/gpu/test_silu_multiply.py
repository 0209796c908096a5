"""SiLU times the other half equals its twin in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels import reference

pytest.importorskip("triton", reason="Triton's kernels need triton")
from kernels.gpu import silu_multiply

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 3e-2}
"""Of half precision: one rounding, where the float32 before it is between two. Triton's interpreter cuts
bfloat16 off where a GPU rounds."""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 1024, 1025])
def test_it_is_the_twins(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    gate_up = (torch.randn(3, 2 * width + 6, generator=generator) * 4).to(dtype)[:, : 2 * width]
    gate_up[0, 0], gate_up[1, 0] = -200.0, 200.0  # far beyond where e^-x overflows
    gate_up[2, width // 2] = float("nan")
    expected = torch.full((3, width), float("nan"), dtype=dtype)
    out = torch.full((3, width + 2), 7.0, dtype=dtype)
    reference.silu_multiply(gate_up, expected)
    silu_multiply.silu_multiply(gate_up, out[:, :width])
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out[:, :width], expected, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert (out[:, width:] == 7).all()
