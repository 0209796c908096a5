"""Best constant estimate of the estimates benchmark."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.bench.estimates.estimates import FLOOR_S, best_constant
from ops.simulate.figures.figures import within_factor


def test_a_constant_fails_where_waits_differ_and_does_well_where_they_do_not() -> None:
    steady = [4.0, 5.0, 6.0, 7.0]
    constant, share = best_constant(steady)
    assert share == 1.0
    assert all(constant / 2 <= wait <= constant * 2 for wait in steady)
    _, share = best_constant([0.01] * 10 + [1.0] * 10 + [10.0] * 10)
    assert share == pytest.approx(1 / 3)


@settings(max_examples=50)
@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=30),
    st.floats(0.001, 200),
)
def test_no_constant_does_better_than_the_best_one(waits: list[float], other: float) -> None:
    _, share = best_constant(waits)
    assert share >= (within_factor([(other, wait) for wait in waits], 2.0, FLOOR_S) or 0.0)


def test_of_nothing_there_is_no_best() -> None:
    assert best_constant([]) == (0.0, 0.0)
