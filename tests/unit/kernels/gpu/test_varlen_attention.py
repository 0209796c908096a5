"""Attention of ragged steps equals its twin in Triton's interpreter."""

from __future__ import annotations

from itertools import cycle, product

import pytest
import torch

from tests.support.paged_steps import OPTIONS, make_step

pytest.importorskip("triton", reason="Triton's kernels need triton, which is there for Linux only")

FLOAT, HALF = torch.float32, torch.bfloat16
PAIRS = [
    (1, 128, 256, FLOAT, "plain"),
    (3, 32, 16, FLOAT, "everything"),
    (4, 256, 16, HALF, "window"),
    (8, 64, 256, HALF, "softcap"),
    (3, 128, 16, HALF, "sinks"),
    (8, 96, 16, FLOAT, "window"),
]
SHAPES = product((1, 3, 4, 8), (32, 64, 128, 256), (16, 256), (FLOAT, HALF))
ALL = [(*shape, option) for shape, option in zip(SHAPES, cycle(OPTIONS), strict=False)]


def is_twin(group: int, head_dim: int, block_tokens: int, dtype: torch.dtype, option: str) -> None:
    """Whole prompts, chunks and decodes, about the ends of a block; a row of padding between."""
    edge = block_tokens
    lens = [(1, 1), (17, 17), (1, edge + 1), (1, 0), (9, edge + 5), (1, edge - 1), (3, edge), (5, 150)]
    step = make_step(lens, group=group, head_dim=head_dim, block_tokens=block_tokens, dtype=dtype)
    step.assert_as_twin("varlen_attention", **OPTIONS[option])


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_prompts_chunks_and_decodes_are_attended_as_by_the_twin(
    case: tuple[int, int, int, torch.dtype, str],
) -> None:
    is_twin(*case)


@pytest.mark.long
@pytest.mark.parametrize("case", ALL, ids=str)
def test_every_shape_is_attended_as_by_the_twin(case: tuple[int, int, int, torch.dtype, str]) -> None:
    is_twin(*case)


@pytest.mark.parametrize("option", OPTIONS)
def test_tiles_may_be_smaller_than_a_program_takes(option: str) -> None:
    step = make_step([(20, 90), (5, 5)], group=6, head_dim=32, block_tokens=4, dtype=HALF, most_in_tile=7)
    step.assert_as_twin("varlen_attention", **OPTIONS[option])


@pytest.mark.parametrize(("group", "head_dim", "value_dim"), [(70, 128, 128), (2, 48, 24), (1, 8, 8)])
def test_large_groups_and_odd_dims_are_attended_too(group: int, head_dim: int, value_dim: int) -> None:
    step = make_step(
        [(6, 70), (1, 1)], group=group, head_dim=head_dim, value_dim=value_dim, block_tokens=16, dtype=FLOAT,
        kv_heads=1,
    )  # fmt: skip
    step.assert_as_twin("varlen_attention", sinks=True)
