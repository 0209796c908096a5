"""The compiled passes between a layer's products equal the formulas, on odd shapes, in both dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from kernels.batch import array_of
from kernels.cpu import layers

ROWS = (1, 2, 7)
WIDTHS = (1, 5, 16, 33, 192)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCE)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("workers", [1, 2])
def test_residual_addition_and_norm(rows: int, width: int, dtype: torch.dtype, workers: int) -> None:
    residual, weight = draw(rows, width), draw(width, dtype=dtype, seed=1)
    addend, normalized = draw(rows, width, dtype=dtype, seed=2), torch.empty(rows, width, dtype=dtype)
    total = residual + addend.float()
    layers.add_and_normalize(
        residual.numpy(), array_of(addend), array_of(weight), np.float32(1e-5), array_of(normalized), workers
    )
    torch.testing.assert_close(residual, total)
    close(normalized, torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5) * total * weight.float())
    before = residual.clone()
    layers.add_and_normalize(
        residual.numpy(), array_of(addend[:0]), array_of(weight), np.float32(1e-5), array_of(normalized),
        workers,
    )  # fmt: skip
    assert torch.equal(residual, before), "no rows to add, nothing added"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_gated_activation(rows: int, width: int, dtype: torch.dtype) -> None:
    both = draw(rows, 2 * width, dtype=dtype, spread=4.0)
    both[0, 0] = -200.0  # far beyond where e^-x overflows
    product = torch.empty(rows, width, dtype=dtype)
    layers.silu_and_multiply(array_of(both), array_of(product), 2)
    close(product, silu(both[:, :width].double()) * both[:, width:].double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalised", [False, True])
def test_rotation_and_cache_write(dtype: torch.dtype, normalised: bool) -> None:
    """Against rotate_half as transformers writes it, heads by heads, slots scattered."""
    heads, kv_heads, key_dim, value_dim, block_tokens = 6, 3, 10, 7, 4
    contexts = np.array([1, 9, 5, 30])
    slots = np.array([13, 0, 7, 21])
    projected = draw(4, (heads + kv_heads) * key_dim + kv_heads * value_dim, dtype=dtype)
    plain = projected.clone()
    angles = torch.outer(torch.arange(40.0), 100.0 ** -(torch.arange(0, key_dim, 2) / key_dim))
    keys = torch.full((6, block_tokens, kv_heads, key_dim), 7.0, dtype=dtype)
    values = torch.full((6, block_tokens, kv_heads, value_dim), 7.0, dtype=dtype)
    weights = [draw(key_dim if normalised else 0, dtype=dtype, seed=seed) for seed in (3, 4)]
    layers.rotate_and_write(
        array_of(projected), heads, angles.cos().numpy(), angles.sin().numpy(), contexts, slots,
        array_of(keys), array_of(values), array_of(weights[0]), array_of(weights[1]), np.float32(1e-5), 2,
    )  # fmt: skip
    turned = plain[:, : (heads + kv_heads) * key_dim].float().view(4, heads + kv_heads, key_dim)
    if normalised:
        scales = torch.cat([weights[0].expand(heads, -1), weights[1].expand(kv_heads, -1)]).float()
        turned = turned * torch.rsqrt(turned.pow(2).mean(-1, keepdim=True) + 1e-5) * scales
    at = torch.cat([angles, angles], -1)[torch.from_numpy(contexts) - 1][:, None]
    half = torch.cat([-turned[..., key_dim // 2 :], turned[..., : key_dim // 2]], -1)
    expected = turned * at.cos() + half * at.sin()
    close(projected[:, : heads * key_dim], expected[:, :heads].reshape(4, -1).to(dtype))
    close(keys.view(-1, kv_heads, key_dim)[slots], expected[:, heads:].to(dtype))
    written = values.view(-1, kv_heads, value_dim)[slots]
    assert torch.equal(written.reshape(4, -1), plain[:, (heads + kv_heads) * key_dim :])
    others = np.setdiff1d(np.arange(24), slots)
    assert (keys.view(-1, kv_heads, key_dim)[others] == 7).all()
    assert (values.view(-1, kv_heads, value_dim)[others] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_table(dtype: torch.dtype) -> None:
    table, taken = draw(9, 5, dtype=dtype), torch.empty(4, 5)
    layers.take_rows(array_of(table), np.array([8, 0, 3, 3]), taken.numpy(), 2)
    assert torch.equal(taken, table[[8, 0, 3, 3]].float())


@pytest.mark.parametrize("width", [1, 2, 511, 512, 513, 4099])
@pytest.mark.parametrize("rows", ROWS)
def test_the_greatest_is_torchs_and_the_first_of_equals(rows: int, width: int) -> None:
    scores = draw(rows, width, seed=width) - 2.0  # mostly negative: signs order the other way round
    scores[-1, width // 3 :] = scores[-1].max()
    winners = np.empty(rows, dtype=np.int64)
    layers.greatest(scores.numpy(), winners, 2)
    assert winners.tolist() == scores.argmax(-1).tolist()


@pytest.mark.parametrize("at", [0, 700])
@pytest.mark.parametrize(
    ("value", "is_sound"),
    [(float("nan"), False), (-float("nan"), False), (float("inf"), False), (-float("inf"), True)],
)
def test_what_is_not_finite_is_seen(value: float, is_sound: bool, at: int) -> None:
    scores = draw(2, 1000)
    best = scores.argmax(-1)
    scores[1, at] = value
    winners = np.empty(2, dtype=np.int64)
    layers.greatest(scores.numpy(), winners, 1)
    assert winners[0] == best[0]
    assert winners[1] == (scores[1].argmax() if is_sound else -1)
    scores[1] = -float("inf")
    layers.greatest(scores.numpy(), winners, 1)
    assert winners[1] == -1


def test_the_exponential_is_exact_to_a_few_last_bits() -> None:
    """As the gate of an activation, x / (1 + e^-x)."""
    gates = torch.linspace(-80, 0, 4001)
    both = torch.cat([gates, torch.ones(4001)])[None]
    product = torch.empty(1, 4001)
    layers.silu_and_multiply(both.numpy(), product.numpy(), 1)
    errors = (product[0].double() - silu(gates.double())).abs()
    assert float(errors.max()) < 2e-7
    assert float((errors / silu(gates.double()).abs())[gates > -8][:-1].max()) < 1e-6
