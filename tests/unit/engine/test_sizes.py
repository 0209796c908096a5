"""Sizes that captured steps are padded to."""

from __future__ import annotations

import pytest

from engine.sizes import decode_sizes, padded

TO_128 = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)


@pytest.mark.parametrize(
    ("max_sequences", "sizes"),
    [
        (1, (1,)),
        (5, (1, 2, 4, 5)),
        (8, (1, 2, 4, 8)),
        (100, (*TO_128[:11], 100)),
        (128, TO_128),
        (130, (*TO_128, 130)),
        (200, (*TO_128, 160, 192, 200)),
    ],
)
def test_sizes_end_with_the_most_sequences(max_sequences: int, sizes: tuple[int, ...]) -> None:
    assert decode_sizes(max_sequences) == sizes


@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 4), (4, 4), (5, 8), (8, 8), (9, 9)])
def test_a_count_is_padded_to_the_next_size(count: int, size: int) -> None:
    assert padded((1, 2, 4, 8), count) == size


def test_without_sizes_nothing_is_padded() -> None:
    assert padded((), 3) == 3
