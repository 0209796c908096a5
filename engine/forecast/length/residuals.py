"""Distribution of a prediction's relative error.

A decaying histogram of (actual - predicted) / predicted spread, in logarithms of lengths. With it a predicted
place and spread become quantiles that never cross, and that are calibrated whatever the shape of the error
is: split conformal prediction's idea (Vovk et al.), with a window that forgets.
"""

from __future__ import annotations

from bisect import bisect_left
from math import exp
from operator import neg

REACH = 6.0
"""Residuals further out count as this far."""
CELLS = 120
WIDTH = 2 * REACH / CELLS
DECAY = 0.998
"""Weight of the past per observation: about 500 count."""
BORROWS = 12.0
"""Samples that the prior is worth."""


def _make_prior() -> list[float]:
    weights = [exp(-abs((index + 0.5) * WIDTH - REACH)) for index in range(CELLS)]
    total = sum(weights)
    return [weight / total for weight in weights]


PRIOR = _make_prior()


class Residuals:
    """The distribution of standardised residuals. One writer."""

    def __init__(self) -> None:
        self.weights = [0.0] * CELLS
        self._step = 1.0
        self._unseen = 0
        """Observations since the survival was last computed."""
        self._survival = self._make_survival()

    def observe(self, residual: float) -> None:
        index = int((min(max(residual, -REACH), REACH - WIDTH / 2) + REACH) / WIDTH)
        self.weights[index] += self._step
        self._step /= DECAY
        if self._step > 1e12:
            self.weights = [weight / self._step for weight in self.weights]
            self._step = 1.0
        self._unseen += 1
        if self._unseen >= 8:
            self._survival = self._make_survival()

    def survival(self, residual: float) -> float:
        """The share of residuals above `residual`."""
        place = (residual + REACH) / WIDTH
        if place <= 0:
            return 1.0
        if place >= CELLS:
            return 0.0
        index = int(place)
        above, below = self._survival[index], self._survival[index + 1]
        return above + (below - above) * (place - index)

    def at(self, survival: float) -> float:
        """The residual that a share `survival` of them lies above."""
        index = min(max(bisect_left(self._survival, -survival, key=neg), 1), CELLS) - 1
        above, below = self._survival[index], self._survival[index + 1]
        part = (above - survival) / (above - below) if above > below else 1.0
        return (index + part) * WIDTH - REACH

    def filled(self) -> list[float]:
        return [weight / self._step for weight in self.weights]

    @staticmethod
    def of(weights: list[float]) -> Residuals:
        """The inverse of `filled`. Raises ValueError for what is no histogram."""
        residuals = Residuals()
        if len(weights) != CELLS or not all(0 <= float(weight) < 1e12 for weight in weights):
            raise ValueError(f"not a histogram of {CELLS} residuals")
        residuals.weights = [float(weight) for weight in weights]
        residuals._survival = residuals._make_survival()
        return residuals

    def _make_survival(self) -> list[float]:
        self._unseen = 0
        borrowed = BORROWS * self._step
        total = sum(self.weights) + borrowed
        survival = [1.0]
        for weight, prior in zip(self.weights, PRIOR, strict=True):
            survival.append(max(0.0, survival[-1] - (weight + borrowed * prior) / total))
        survival[-1] = 0.0
        return survival
