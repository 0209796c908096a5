"""How long will a step take?

A linear model, fitted online to relative error (as DistServe does): a step of 2 ms and one of 200 ms count
alike. Four features: a constant, tokens computed, context attended to (summed over the tokens), sequences.

    t = base + per_token * tokens + per_context_token * context + per_sequence * sequences

The fit is ridge regression on exponentially decayed normal equations. Before there is data the coefficients
are a prior's; the first samples scale the prior as a whole, later ones change its shape. Coefficients are
never negative, and an observation far from the prediction is clipped, so that one pause of the machine does
not bend the model; when many in a row are far off, the machine has changed and the model starts anew.

So it says what a typical step takes. A wait is a sum of many, slow ones included: what they take in the mean
over what is predicted is the `pace`.

Pure Python: a gateway has no numpy.
"""

from __future__ import annotations

from math import inf
from typing import Any

from engine.messages import StepTime

PRIOR = StepTime(
    base_s=2e-3,
    per_token_s=40e-6,
    per_context_token_s=20e-9,
    per_sequence_s=100e-6,
    samples=0,
    relative_error=1.0,
)
"""A small model on a CPU. Only the proportions matter once there are samples."""

DECAY = 0.998
"""Weight of the past per step: about 500 steps count."""
RIDGE = 0.1
"""How many samples the prior's shape is worth."""
CLIP_FACTOR = 3.0
CLIP_AFTER = 12
"""Samples before the prediction is good enough to clip by."""
CHANGED_AFTER = 24
"""So many observations in a row that had to be clipped are no outliers."""
REFIT_EVERY = 8
ERROR_SMOOTHING = 0.05
PACE_DECAY = 0.9998
"""Weight of the past per step in the pace: about 5,000 steps count."""
PACE_CLIP = 20.0
"""A step that took longer than so many times its prediction counts as that."""
_FEATURES = 4


def predict_step_s(step_time: StepTime, tokens: int, context_tokens: int, sequences: int) -> float:
    """Seconds for a step that computes `tokens` of `sequences`, attending to `context_tokens` in all."""
    return (
        step_time.base_s
        + step_time.per_token_s * tokens
        + step_time.per_context_token_s * context_tokens
        + step_time.per_sequence_s * sequences
    )


class StepTimeModel:
    """The fit of one engine. One writer: the engine's core."""

    def __init__(self, prior: StepTime = PRIOR) -> None:
        """Raises ValueError for a prior that is not positive in its constant and per token."""
        if not (prior.base_s > 0 and prior.per_token_s > 0):
            raise ValueError("the prior needs a positive base_s and per_token_s")
        self._prior = prior
        self._coefficients = _coefficients(prior)
        self._gram = [[0.0] * _FEATURES for _ in range(_FEATURES)]
        self._moment = [0.0] * _FEATURES
        self._samples = 0
        self._fitted = 0
        """Samples since the model last started anew."""
        self._clipped_in_a_row = 0
        self._relative_error = prior.relative_error
        self._taken_s = 0.0
        self._foreseen_s = 0.0
        """What steps took, and what was predicted for them; decayed."""

    @staticmethod
    def from_message(message: StepTime) -> StepTimeModel:
        """A model that goes on from what another one learned."""
        model = StepTimeModel(message)
        model._samples = message.samples
        return model

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON: with them a restarted engine goes on as if it had not stopped."""
        return {
            "coefficients": self._coefficients,
            "gram": self._gram,
            "moment": self._moment,
            "samples": self._samples,
            "fitted": self._fitted,
            "relative_error": self._relative_error,
            "taken_s": self._taken_s,
            "foreseen_s": self._foreseen_s,
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> StepTimeModel:
        """The inverse of `to_dict`. Raises ValueError for anything else."""
        model = StepTimeModel()
        try:
            model._coefficients = _numbers(data["coefficients"])
            model._moment = _numbers(data["moment"])
            if len(data["gram"]) != _FEATURES:
                raise ValueError(f"{len(data['gram'])} rows, expected {_FEATURES}")
            model._gram = [_numbers(row) for row in data["gram"]]
            model._samples, model._fitted = int(data["samples"]), int(data["fitted"])
            model._relative_error = float(data["relative_error"])
            # Files of earlier versions do not have them.
            model._taken_s = float(data.get("taken_s", 0.0))
            model._foreseen_s = float(data.get("foreseen_s", 0.0))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a step-time model: {error}") from None
        is_sound = 0 <= model._relative_error < inf and 0 <= model._fitted <= model._samples
        is_sound &= 0 <= model._taken_s < inf and 0 <= model._foreseen_s < inf
        if not is_sound or model.predict(1, 1, 1) <= 0:
            raise ValueError("not a step-time model: it makes no sense")
        return model

    @property
    def samples(self) -> int:
        """Steps seen."""
        return self._samples

    @property
    def pace(self) -> float:
        """What steps take in the mean, over what is predicted for them; 1 while nothing is known of it."""
        return self._taken_s / self._foreseen_s if self._taken_s > 0 < self._foreseen_s else 1.0

    def observe(self, tokens: int, context_tokens: int, sequences: int, duration_s: float) -> None:
        """Learns from one step. A duration that is not positive says nothing and is left out."""
        if not duration_s > 0:
            return
        predicted_s = self.predict(tokens, context_tokens, sequences)
        self._note_error(abs(predicted_s - duration_s) / duration_s)
        if self._fitted >= CLIP_AFTER:
            self._taken_s = self._taken_s * PACE_DECAY + min(duration_s, PACE_CLIP * predicted_s)
            self._foreseen_s = self._foreseen_s * PACE_DECAY + predicted_s
            duration_s = self._clipped(duration_s, predicted_s)
        features = [value / duration_s for value in (1.0, tokens, context_tokens, sequences)]
        for row, left in enumerate(features):
            self._moment[row] = self._moment[row] * DECAY + left
            gram_row = self._gram[row]
            for column, right in enumerate(features):
                gram_row[column] = gram_row[column] * DECAY + left * right
        self._samples += 1
        self._fitted += 1
        if self._fitted <= REFIT_EVERY or self._fitted % REFIT_EVERY == 0:
            self._coefficients = self._fit()

    def predict(self, tokens: int, context_tokens: int, sequences: int) -> float:
        """Seconds for a step."""
        base, per_token, per_context, per_sequence = self._coefficients
        return base + per_token * tokens + per_context * context_tokens + per_sequence * sequences

    def to_message(self) -> StepTime:
        """The fit as it travels in a snapshot."""
        base, per_token, per_context, per_sequence = self._coefficients
        return StepTime(
            base_s=base,
            per_token_s=per_token,
            per_context_token_s=per_context,
            per_sequence_s=per_sequence,
            samples=self._samples,
            relative_error=self._relative_error,
        )

    def _note_error(self, error: float) -> None:
        # A plain mean first, then an exponential one.
        weight = max(ERROR_SMOOTHING, 1 / (self._samples + 1))
        self._relative_error += weight * (error - self._relative_error)

    def _clipped(self, duration_s: float, predicted_s: float) -> float:
        clipped_s = min(max(duration_s, predicted_s / CLIP_FACTOR), predicted_s * CLIP_FACTOR)
        if clipped_s == duration_s:
            self._clipped_in_a_row = 0
            return duration_s
        self._clipped_in_a_row += 1
        if self._clipped_in_a_row < CHANGED_AFTER:
            return clipped_s
        self._clipped_in_a_row = self._fitted = 0
        self._gram = [[0.0] * _FEATURES for _ in range(_FEATURES)]
        self._moment = [0.0] * _FEATURES
        return duration_s

    def _fit(self) -> list[float]:
        prior = _coefficients(self._prior)
        curvature = sum(
            prior[row] * self._gram[row][column] * prior[column]
            for row in range(_FEATURES)
            for column in range(_FEATURES)
        )
        scale = sum(value * moment for value, moment in zip(prior, self._moment, strict=True)) / curvature
        target = [max(value, 1e-12) * scale for value in prior]
        active = list(range(_FEATURES))
        while active:
            matrix = [
                [
                    self._gram[row][column] + (RIDGE / target[row] ** 2 if row == column else 0.0)
                    for column in active
                ]
                for row in active
            ]
            solution = solve(matrix, [self._moment[row] + RIDGE / target[row] for row in active])
            lowest = min(range(len(active)), key=lambda index: solution[index] * _UNIT[active[index]])
            if solution[lowest] >= 0:
                coefficients = [0.0] * _FEATURES
                for row, value in zip(active, solution, strict=True):
                    coefficients[row] = value
                return coefficients
            # Non-negative least squares by dropping the most negative term and solving again.
            del active[lowest]
        return target


_UNIT = (1.0, 64.0, 16_384.0, 16.0)
"""Typical size of each feature: makes coefficients comparable."""


def _numbers(values: Any) -> list[float]:
    """One for each feature, none of them negative. Raises ValueError."""
    numbers = [float(value) for value in values]
    if len(numbers) != _FEATURES or not all(0 <= number < inf for number in numbers):
        raise ValueError(f"expected {_FEATURES} numbers of at least 0")
    return numbers


def _coefficients(message: StepTime) -> list[float]:
    return [message.base_s, message.per_token_s, message.per_context_token_s, message.per_sequence_s]


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
