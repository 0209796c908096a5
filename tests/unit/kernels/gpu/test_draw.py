"""Drawn tokens are those of `kernels.sampling`, in Triton's interpreter."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kernels import reference, sampling

pytest.importorskip("triton", reason="Triton's kernels need triton")
from kernels.gpu import draw

VOCABULARY, FALLBACK = 300, 2
Drawn = tuple[list[int], list[bool]]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several to a vocabulary, the last one not full."""
    monkeypatch.setitem(draw.PARTS, "part_tokens", 128)
    monkeypatch.setitem(draw.CUTS, "span", 256)


def some_logits(rows: int, seed: int) -> torch.Tensor:
    """Every second batch has many equal ones; every third row a mask. What lies beside must not be read."""
    logits = torch.full((rows + 1, VOCABULARY + 7), float("inf"))[:rows, :VOCABULARY]
    logits.copy_(torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3)
    logits[::3, 50:290] = float("-inf")
    return logits.round_() if seed % 2 else logits


def some_rows(count: int, seed: int) -> sampling.Draws:
    generator = random.Random(seed)

    def column(*choices: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([generator.choice(choices) for _ in range(count)], dtype=dtype)

    return sampling.Draws(
        temperature=column(0.0, 1e-7, 0.3, 1.0, 1.0, 2.0),
        top_k=column(0, 0, 1, 5, 30, VOCABULARY, 2 * VOCABULARY, dtype=torch.int32),
        top_p=column(1.0, 1.0, 0.0, 0.5, 0.9, 0.999),
        min_p=column(0.0, 0.0, 0.05, 0.5, 1.0),
        seeds=torch.tensor([generator.getrandbits(63) for _ in range(count)]),
        token_index=column(0, 1, 7, 2**31 - 1, dtype=torch.int64),
    )


def plain_rows(count: int) -> sampling.Draws:
    """Each draws without a cut, with a seed of its own."""
    ones, seeds = torch.ones(count), torch.arange(count) * 0x1234567891
    return sampling.Draws(ones, torch.zeros(count).int(), ones, 0 * ones, seeds, seeds.flip(0) % 1000)


def columns(rows: sampling.Draws) -> list[torch.Tensor]:
    return [getattr(rows, name) for name in sampling.Draws.__slots__]


def drawn(logits: torch.Tensor, rows: sampling.Draws, *, by_twin: bool = False) -> Drawn:
    """Token ids, and which rows were not finite."""
    token_ids, unsound = torch.full((len(logits),), -999), torch.randint(0, 2, (len(logits),)).bool()
    way = reference.draw if by_twin else draw.draw
    way(logits, *columns(rows), FALLBACK, token_ids, unsound)
    return token_ids.tolist(), unsound.tolist()


LONG = pytest.mark.long
CASES = [(0, torch.float32), (1, torch.bfloat16)]
MORE = [(seed, dtype) for seed in range(2, 20) for dtype in (torch.float32, torch.float16)]


@pytest.mark.parametrize(("seed", "dtype"), [*CASES, *[pytest.param(*case, marks=LONG) for case in MORE]])
def test_every_mixture_of_options_gives_the_twins_tokens(seed: int, dtype: torch.dtype) -> None:
    logits, rows = some_logits(7, seed).to(dtype), some_rows(7, seed)
    assert drawn(logits, rows) == drawn(logits, rows, by_twin=True)


@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=LONG) for seed in range(1, 9)]])
def test_a_cut_leaves_what_the_twins_leaves(seed: int) -> None:
    """Two or three tokens are left, all about as likely: one more or less shows in some row."""
    logits, rows = torch.full((9, VOCABULARY), -9.0), plain_rows(9)
    rows.seeds = torch.arange(9) + 9 * seed
    logits[:, [9, 131, 132, 260, 299]] = torch.tensor([0.02, 0.01, 0.0, -0.01, -0.02])
    rows.top_k[:3], rows.top_p[3:6], rows.min_p[6:] = 2, 0.5, 0.985
    token_ids, _ = drawn(logits, rows)
    assert token_ids == drawn(logits, rows, by_twin=True)[0]
    assert set(token_ids) <= {9, 131, 132}


def test_the_noise_is_the_twins() -> None:
    """Of equal logits the noise alone decides."""
    logits, rows = torch.zeros(24, 100), plain_rows(24)
    token_ids, _ = drawn(logits, rows)
    assert token_ids == drawn(logits, rows, by_twin=True)[0]
    assert len(set(token_ids)) > 18


def test_a_token_depends_on_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on its place, nor on the others, nor on how the vocabulary is cut into parts."""
    logits, rows = some_logits(6, 4) / 9, plain_rows(6)
    rows.top_k[5], rows.top_p[2] = 200, 0.9
    token_ids, _ = drawn(logits, rows)
    order = [5, 2, 0]
    monkeypatch.setitem(draw.PARTS, "part_tokens", 512)
    monkeypatch.setitem(draw.CUTS, "span", 128)
    moved = sampling.Draws(*[column[order] for column in columns(rows)])
    assert drawn(logits[order], moved)[0] == [token_ids[place] for place in order]


def test_the_first_of_equal_tokens_is_taken() -> None:
    logits, rows = torch.zeros(3, VOCABULARY), some_rows(3, 0)
    rows.temperature.zero_()
    logits[1, [130, 70, 200, 75]], logits[2, 299] = 1.0, 1.0
    assert drawn(logits, rows) == ([0, 70, 299], [False] * 3)


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_what_is_not_finite_is_repaired_and_reported(heat: float) -> None:
    logits, rows = some_logits(6, 2), plain_rows(6)
    rows.temperature[:], rows.top_k[:], rows.top_p[1:4] = heat, 20, 0.9
    rows.temperature[5] = rows.top_k[5] = rows.top_p[5] = 0  # as a padded row has it
    logits[0] = float("nan")
    logits[1, [17, 260]] = float("inf")
    logits[2] = -float("inf")
    logits[3, : VOCABULARY - 40] = float("nan")
    logits[4, 5:] = -float("inf")
    logits[5] = float("nan")
    with np.errstate(over="ignore"):  # an infinite logit becomes the greatest number
        token_ids, unsound = drawn(logits, rows)
    assert (token_ids, unsound) == drawn(logits, rows, by_twin=True)
    assert unsound == [True, True, True, True, False, True]
    assert [token_ids[place] for place in (0, 2, 5)] == [FALLBACK] * 3
