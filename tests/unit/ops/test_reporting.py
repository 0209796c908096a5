"""Figures of reports: quantiles, numbers for people and checks."""

from __future__ import annotations

import math

from ops.reporting import Check, number, plain, quantile


def test_quantiles_and_numbers() -> None:
    assert quantile([4, 1, 3, 2], 0.5) == 2
    assert quantile(range(1, 101), 0.99) == 99
    assert math.isnan(quantile([], 0.5))
    assert [number(value) for value in (1234.5, 0.01234, 1.5, math.inf)] == [
        "1,234",
        "0.0123",
        "1.50",
        "never",
    ]
    assert plain({"a": [1.0, 0.5, math.inf]}) == {"a": [1.0, 0.5, None]}


def test_a_check_holds_to_its_side() -> None:
    assert Check("x", 1.0, 1.0).ok
    assert not Check("x", 1.1, 1.0).ok
    assert Check("x", 1.1, 1.0, at_most=False).ok
    assert not Check("x", 0.9, 1.0, at_most=False).ok
