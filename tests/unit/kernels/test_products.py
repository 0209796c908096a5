"""The compiled matrix product: correct on odd shapes, and each row independent of the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.batch import array_of
from kernels.cpu import products
from kernels.cpu.products import PANEL, lay_out, multiply, padded, plain_weight

REPOSITORY = Path(__file__).parents[3]
SHAPES = [(1, 1), (5, 3), (64, 17), (65, 64), (300, 33)]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, workers: int = 2) -> torch.Tensor:
    whole_bias = np.zeros(padded(len(weight)), dtype=np.float32)
    whole_bias[: len(weight)] = bias
    result = np.full((len(rows), padded(len(weight))), np.nan, dtype=np.float32)
    multiply(rows.numpy(), lay_out(array_of(weight)), whole_bias, result, workers)
    assert not result[:, len(weight) :].any(), "what fills the last panel up stays zero"
    return torch.from_numpy(result[:, : len(weight)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_product_and_its_bias(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight, bias = draw(outputs, inputs, seed=1, dtype=dtype), draw(outputs, seed=2)
    for count in (0, 1, 5, 6, 7, 13, 40):
        rows = draw(count, inputs, seed=3)
        expected = (rows.double() @ weight.double().t() + bias.double()).float()
        torch.testing.assert_close(product(rows, weight, bias), expected, atol=2e-5, rtol=2e-5)


def test_neither_company_nor_workers_change_a_bit_of_a_row() -> None:
    weight, bias, rows = draw(200, 70, seed=1), draw(200, seed=2), draw(41, 70, seed=3)
    whole = product(rows, weight, bias, workers=1)
    for count in range(1, 42):
        for workers in (1, 2, 3):
            assert torch.equal(product(rows[:count], weight, bias, workers), whole[:count]), (count, workers)
    assert torch.equal(product(rows[17:18], weight, bias), whole[17:18])


def test_inputs_may_be_wider_than_the_weight() -> None:
    """The padded output of one product is the input of the next."""
    weight, rows = draw(70, 10, seed=1), draw(9, 16, seed=3)
    expected = product(rows[:, :10].contiguous(), weight, torch.zeros(70))
    assert torch.equal(product(rows, weight, torch.zeros(70)), expected)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_laying_out_changes_no_bit(outputs: int, inputs: int) -> None:
    weight = draw(outputs, inputs, seed=1).numpy()
    panels = lay_out(weight)
    assert panels.shape == (-(-outputs // PANEL), inputs, PANEL)
    assert np.array_equal(plain_weight(panels, outputs), weight)


def test_every_height_of_a_tile_is_met() -> None:
    """Rows 1 to 12 split into tiles of each height from 1 to `TILE_ROWS`."""
    heights = set()
    for rows in range(1, 13):
        tiles = -(-rows // products.TILE_ROWS)
        heights |= {rows * (tile + 1) // tiles - rows * tile // tiles for tile in range(tiles)}
    assert heights == set(range(1, products.TILE_ROWS + 1))


def test_panels_of_another_machines_width_give_the_same_bits(tmp_path: Path) -> None:
    """Wide ones are for AVX-512, narrow ones for the rest: what runs elsewhere is tried here too."""
    script = f"""
import sys
import numpy as np
from kernels.cpu import products as products

vectors = 1 if products.VECTORS == 4 else 4
products.VECTORS, products.PANEL = vectors, vectors * products.LANES
rows, weight, bias = (np.load(f"{tmp_path}/{{name}}.npy") for name in ("rows", "weight", "bias"))
panels = products.lay_out(weight)
width = products.padded(len(weight))
whole_bias = np.zeros(width, dtype=np.float32)
whole_bias[: len(weight)] = bias
for count in range(1, len(rows) + 1):
    result = np.empty((count, width), dtype=np.float32)
    products.multiply(rows[:count], panels, whole_bias, result, 2)
    np.save(f"{tmp_path}/result-{{count}}.npy", result[:, : len(weight)])
print(width)
"""
    rows, weight, bias = draw(25, 50, seed=3), draw(150, 50, seed=1), draw(150, seed=2)
    for name, values in (("rows", rows), ("weight", weight), ("bias", bias)):
        np.save(tmp_path / f"{name}.npy", values.numpy())
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "compiled")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == (160 if PANEL == 64 else 192)
    for count in range(1, 26):
        other = torch.from_numpy(np.load(tmp_path / f"result-{count}.npy"))
        assert torch.equal(product(rows[:count], weight, bias), other), count
