"""Decode attention and its combine equal their twin in Triton's interpreter, however contexts are cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

import pytest
import torch

from kernels.gpu import configurations
from kernels.gpu.configurations import AttentionLaunch
from tests.support.paged_steps import OPTIONS, make_step

pytest.importorskip("triton", reason="Triton's kernels need triton, which is there for Linux only")

FLOAT, HALF = torch.float32, torch.bfloat16
PAIRS = [
    (1, 32, 16, FLOAT, "window"),
    (3, 64, 256, FLOAT, "everything"),
    (4, 128, 16, HALF, "softcap"),
    (8, 256, 256, HALF, "sinks"),
    (8, 80, 16, HALF, "plain"),
    (3, 32, 256, HALF, "window"),
]
SHAPES = product((1, 3, 4, 8), (32, 64, 128, 256), (16, 256), (FLOAT, HALF))
ALL = [(*shape, option) for shape, option in zip(SHAPES, cycle(OPTIONS), strict=False)]
CUTS = [
    (1, 1 << 20, "plain"),
    (2, 16, "everything"),
    (4, 32, "sinks"),
    (8, 16, "window"),
    (32, 16, "softcap"),
]


def is_twin(group: int, head_dim: int, block_tokens: int, dtype: torch.dtype, option: str) -> None:
    """At contexts about the ends of a block, and longer than one and two reads of keys."""
    contexts = [0, 1, block_tokens - 1, block_tokens, block_tokens + 1, 150]
    step = make_step(
        [(1, context) for context in contexts],
        group=group, head_dim=head_dim, block_tokens=block_tokens, dtype=dtype,
    )  # fmt: skip
    step.assert_as_twin("decode_attention", **OPTIONS[option])


@pytest.fixture
def four_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs than on a GPU: the interpreter takes long for each."""
    for shape, choices in configurations.DECODES.items():
        launch = choices[-1][1]
        parts = AttentionLaunch(launch.rows, launch.keys, launch.warps, launch.stages, 48, 64)
        monkeypatch.setitem(configurations.DECODES, shape, ((1 << 40, parts),))


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_contexts_about_the_ends_of_blocks_are_attended_as_by_the_twin(
    case: tuple[int, int, int, torch.dtype, str], four_parts: None
) -> None:
    is_twin(*case)


@pytest.mark.long
@pytest.mark.parametrize("case", ALL, ids=str)
def test_every_shape_is_attended_as_by_the_twin_with_the_table_of_launches(
    case: tuple[int, int, int, torch.dtype, str],
) -> None:
    is_twin(*case)


@pytest.mark.parametrize(("parts", "least", "option"), CUTS)
def test_a_context_that_is_cut_is_attended_as_a_whole_one(
    parts: int, least: int, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that have one part, some and all of them, in one step; and one of padding."""
    launch = AttentionLaunch(16, 16, 4, 2, 4 * parts, least)
    assert launch.parts(4) == parts
    monkeypatch.setitem(configurations.DECODES, (4, 32), ((4, launch),))
    lens = [(1, 0), (1, 15), (1, 70), (1, 16 * parts + 1)]
    step = make_step(lens, group=3, head_dim=32, block_tokens=4, dtype=FLOAT, kv_heads=1)
    step.assert_as_twin("decode_attention", **OPTIONS[option])


@pytest.mark.parametrize(
    ("group", "head_dim", "value_dim"), [(20, 32, 32), (2, 48, 24), (1, 8, 8)], ids=str
)  # fmt: skip
def test_large_groups_and_odd_dims_are_attended_too(group: int, head_dim: int, value_dim: int) -> None:
    step = make_step(
        [(1, 40), (1, 7)], group=group, head_dim=head_dim, value_dim=value_dim, block_tokens=16, dtype=FLOAT,
        kv_heads=1,
    )  # fmt: skip
    step.assert_as_twin("decode_attention", sinks=True)


def test_a_block_beyond_two_to_the_31_numbers_is_found() -> None:
    """Of a cache that is as large only in addresses: nothing else is touched, nor what lies before it, which
    is as large, for a number that turned negative."""
    step = make_step([(1, 16)], group=1, head_dim=32, block_tokens=16, dtype=HALF, kv_heads=1)
    query, cache, _, tables, starts, contexts = step.places
    blocks = 2**31 // (16 * 32) + 1
    far = torch.empty(2 * blocks, 16, 1, 32, dtype=HALF)[blocks:]
    far[-1] = cache[tables[0]]
    places = (query, far, far, torch.tensor([blocks - 1]), starts, contexts)
    replace(step, places=places).assert_as_twin("decode_attention")


def test_parts_of_the_table_of_launches_are_whole_reads_of_keys() -> None:
    for choices in configurations.DECODES.values():
        for most, launch in choices:
            assert launch.least % launch.keys == 0
            assert 1 <= launch.parts(min(most, 4096)) <= launch.parts(1) <= configurations.MOST_PARTS
