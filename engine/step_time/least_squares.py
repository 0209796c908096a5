"""Online least squares with a prior.

Ridge regression on exponentially decayed normal equations. The prior's shape is scaled to the data as a whole
by the first samples and changed by later ones. Coefficients are never negative: the most negative term is
dropped and the rest solved again. Pure Python: a gateway has no numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

RIDGE = 0.1
"""Weight of the prior's shape, in samples."""
SMALLEST = 1e-12
"""Replaces a coefficient 0 of the prior, so that it may grow."""


class NormalEquations:
    """Sums over samples of `features @ features.T` and `features * target`, both already weighted."""

    def __init__(self, features: int, decay: float) -> None:
        """`decay`: weight of the past per sample."""
        self._decay = decay
        self._gram = [[0.0] * features for _ in range(features)]
        self._moment = [0.0] * features

    def add(self, features: Sequence[float], target: float) -> None:
        decay, moment = self._decay, self._moment
        for row, left in enumerate(features):
            moment[row] = moment[row] * decay + left * target
            gram_row = self._gram[row]
            for column, right in enumerate(features):
                gram_row[column] = gram_row[column] * decay + left * right

    def clear(self) -> None:
        size = len(self._moment)
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size

    def fit(self, prior: Sequence[float], units: Sequence[float]) -> list[float] | None:
        """The coefficients; None before the first sample. `units`: the typical size of each feature."""
        size = len(prior)
        curvature = sum(
            prior[row] * self._gram[row][column] * prior[column]
            for row in range(size)
            for column in range(size)
        )
        if not curvature > 0:
            return None
        scale = sum(value * moment for value, moment in zip(prior, self._moment, strict=True)) / curvature
        target = [max(value, SMALLEST) * scale for value in prior]
        active = list(range(size))
        while active:
            matrix = [
                [
                    self._gram[row][column] + (RIDGE / target[row] ** 2 if row == column else 0.0)
                    for column in active
                ]
                for row in active
            ]
            solution = solve(matrix, [self._moment[row] + RIDGE / target[row] for row in active])
            lowest = min(range(len(active)), key=lambda index: solution[index] * units[active[index]])
            if solution[lowest] >= 0:
                coefficients = [0.0] * size
                for row, value in zip(active, solution, strict=True):
                    coefficients[row] = value
                return coefficients
            # Non-negative least squares by dropping the most negative term and solving again.
            del active[lowest]
        return target

    def to_dict(self) -> dict[str, Any]:
        return {"gram": self._gram, "moment": self._moment}

    def load(self, data: dict[str, Any]) -> None:
        """Restores the result of `to_dict`. Raises KeyError, TypeError or ValueError for anything else."""
        size = len(self._moment)
        if len(data["gram"]) != size:
            raise ValueError(f"{len(data['gram'])} rows, expected {size}")
        self._gram = [numbers(row, size) for row in data["gram"]]
        self._moment = numbers(data["moment"], size)


def numbers(values: Any, size: int) -> list[float]:
    """`size` numbers, none of them negative. Raises TypeError or ValueError."""
    checked = [float(value) for value in values]
    if len(checked) != size or not all(0 <= number < inf for number in checked):
        raise ValueError(f"expected {size} numbers of at least 0")
    return checked


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solves a small positive definite system by elimination with pivots; the inputs are consumed."""
    size = len(right)
    # Rows and columns are scaled to a unit diagonal: features differ by ten orders of magnitude.
    norms = [matrix[index][index] ** 0.5 for index in range(size)]
    rows = [
        [matrix[row][column] / (norms[row] * norms[column]) for column in range(size)]
        + [right[row] / norms[row]]
        for row in range(size)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(column + 1, size):
            factor = rows[row][column] / rows[column][column]
            for index in range(column, size + 1):
                rows[row][index] -= factor * rows[column][index]
    solution = [0.0] * size
    for row in range(size - 1, -1, -1):
        known = sum(rows[row][column] * solution[column] for column in range(row + 1, size))
        solution[row] = (rows[row][size] - known) / rows[row][row]
    return [value / norm for value, norm in zip(solution, norms, strict=True)]
