"""`StepTimeModel`: predicts the duration of a step.

A linear model, fitted online to relative error (as DistServe does; `least_squares.py`), of four features:

    t = base + per_token * tokens + per_context_token * context + per_sequence * sequences

Where steps are padded to captured sizes, tokens and sequences are those of the size: a staircase.
An observation far from the prediction is clipped; when many in a row are far off, the model starts anew. So
it predicts a typical recent step. The `mean` is a second fit, to the mean and over more steps, each weighted
by the prior's prediction: weights by measured durations would make slow steps count for less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, Protocol

import msgspec

from engine.messages import StepTime
from engine.sizes import DECODE_TOKENS, padded
from engine.step_time.least_squares import SMALLEST, NormalEquations, numbers

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
CLIP_FACTOR = 3.0
CLIP_AFTER = 12
"""Samples before the prediction is good enough to clip by."""
CHANGED_AFTER = 24
"""Successive clipped observations after which they are no outliers."""
REFIT_EVERY, REFIT_SETTLED_EVERY = 8, 32
"""Samples between two fits, which cost as much as many samples: up to `SETTLED_AFTER`, and later."""
SETTLED_AFTER = 64
ERROR_SMOOTHING = 0.05
MEAN_DECAY = 0.99999
"""Weight of the past per step in the mean: about 100,000 steps count, some minutes of a busy engine."""
STEPS_OF_MEAN = round(1 / (1 - MEAN_DECAY))
MEAN_CLIP = 20.0
"""Bound of a step's duration in the mean, in multiples of its prediction."""
_FEATURES = 4
FITS_AT_ONCE = 32
"""Each is the prior of the next, so that coefficients without data stay in proportion."""
TimedStep = tuple[int, int, int, float]
"""Tokens, context tokens, sequences and seconds of a step."""


class CapturedSizes(Protocol):
    """What steps are padded to, as in `StepTime`: a runner, a model, a fit."""

    @property
    def graph_sizes(self) -> tuple[int, ...]: ...
    @property
    def mixed_sizes(self) -> tuple[int, ...]: ...


def padded_shape(sizes: CapturedSizes, tokens: int, sequences: int) -> tuple[int, int]:
    """Tokens and sequences of the size that one step is padded to."""
    if not tokens:
        return 0, sequences
    if tokens != DECODE_TOKENS * sequences:
        return padded(sizes.mixed_sizes, tokens), sequences
    rows = padded(sizes.graph_sizes, sequences)
    return DECODE_TOKENS * rows, rows


def predict_step_s(step_time: StepTime, tokens: int, context_tokens: int, sequences: int) -> float:
    """Seconds for a step that computes `tokens` of `sequences`, attending to `context_tokens` in all."""
    if step_time.graph_sizes or step_time.mixed_sizes:
        tokens, sequences = padded_shape(step_time, tokens, sequences)
    return predict_shape_s(step_time, tokens, context_tokens, sequences)


def predict_shape_s(step_time: StepTime, tokens: int, context_tokens: int, sequences: int) -> float:
    """As `predict_step_s`, of what is padded already, or of several steps but for the base of the others."""
    return (
        step_time.base_s
        + step_time.per_token_s * tokens
        + step_time.per_context_token_s * context_tokens
        + step_time.per_sequence_s * sequences
    )


def predict_decodes_s(step_time: StepTime, sequences: int, context_tokens: int) -> float:
    """Seconds for a step in which each of `sequences` decodes; their contexts sum to `context_tokens`."""
    return predict_step_s(step_time, DECODE_TOKENS * sequences, DECODE_TOKENS * context_tokens, sequences)


def mean_of(fits: Iterable[StepTime | None]) -> StepTime | None:
    """The mean of several fits, each by the steps that its own mean remembers; None of none. The engines are
    alike: the sizes are those of the first."""
    weighted = [(fit, min(fit.samples, STEPS_OF_MEAN)) for fit in fits if fit is not None]
    total = sum(weight for _, weight in weighted)
    if not total:
        return weighted[-1][0] if weighted else None
    names = ("base_s", "per_token_s", "per_context_token_s", "per_sequence_s", "relative_error")
    means = {name: sum(getattr(fit, name) * weight for fit, weight in weighted) / total for name in names}
    samples = max(fit.samples for fit, _ in weighted)
    return msgspec.structs.replace(weighted[0][0], samples=samples, **means)


class StepTimeModel:
    """The fit of one engine. One writer: the engine's core."""

    def __init__(self, prior: StepTime = PRIOR, *, keeps_mean: bool = True) -> None:
        """`keeps_mean` False halves the work. Raises ValueError unless base and per token are positive."""
        if not (prior.base_s > 0 and prior.per_token_s > 0):
            raise ValueError("the prior needs a positive base_s and per_token_s")
        self.graph_sizes, self.mixed_sizes = prior.graph_sizes, prior.mixed_sizes
        self._prior = prior
        self._coefficients = _coefficients(prior)
        self._typical = NormalEquations(_FEATURES, DECAY)
        self._mean = NormalEquations(_FEATURES, MEAN_DECAY)
        self._keeps_mean = keeps_mean
        self._samples = 0
        self._fitted = 0
        self._clipped_in_a_row = 0
        self._relative_error = prior.relative_error

    @staticmethod
    def of_steps(steps: Sequence[TimedStep]) -> StepTimeModel:
        """Fitted to all of these at once: none was predicted before. Its error is that of the fit."""
        model = StepTimeModel()
        for tokens, context_tokens, sequences, duration_s in steps:
            features = (1.0, tokens, context_tokens, sequences)
            model._typical.add([value / duration_s for value in features], 1.0)
        for _ in range(FITS_AT_ONCE):
            model._coefficients = model._typical.fit(model._coefficients, _UNITS) or model._coefficients
        model._prior = model._message([max(value, SMALLEST) for value in model._coefficients])
        for step in steps:
            model._add_to_mean(*step)
        model._samples = model._fitted = len(steps)
        if steps:
            errors = [abs(model.predict(*shape) - took_s) / took_s for *shape, took_s in steps]
            model._relative_error = sum(errors) / len(errors)
        return model

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: a restarted engine continues exactly from them."""
        return {
            "coefficients": self._coefficients,
            **self._typical.to_dict(),
            "samples": self._samples,
            "fitted": self._fitted,
            "relative_error": self._relative_error,
            "mean": self._mean.to_dict(),
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> StepTimeModel:
        """The inverse of `to_dict`. Raises ValueError for anything else."""
        model = StepTimeModel()
        try:
            model._coefficients = numbers(data["coefficients"], _FEATURES)
            model._typical.load(data)
            model._samples, model._fitted = int(data["samples"]), int(data["fitted"])
            model._relative_error = float(data["relative_error"])
            if "mean" in data:  # Files of earlier versions have none.
                model._mean.load(data["mean"])
                model.mean()  # raises for a damaged file
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise ValueError(f"not a step-time model: {error}") from None
        is_sound = 0 <= model._relative_error < inf and 0 <= model._fitted <= model._samples
        if not is_sound or model.predict(1, 1, 1) <= 0:
            raise ValueError("not a step-time model: it makes no sense")
        return model

    @property
    def samples(self) -> int:
        return self._samples

    def pad_to(self, sizes: CapturedSizes) -> None:
        """From now on steps are padded to these."""
        self.graph_sizes, self.mixed_sizes = sizes.graph_sizes, sizes.mixed_sizes

    def observe(self, tokens: int, context_tokens: int, sequences: int, duration_s: float) -> None:
        """Learns from one step. A duration that is not positive is ignored."""
        if not duration_s > 0:
            return
        tokens, sequences = padded_shape(self, tokens, sequences)
        predicted_s = self.predict(tokens, context_tokens, sequences)
        self._note_error(abs(predicted_s - duration_s) / duration_s)
        if self._fitted >= CLIP_AFTER:
            if self._keeps_mean:
                self._add_to_mean(tokens, context_tokens, sequences, min(duration_s, MEAN_CLIP * predicted_s))
            duration_s = self._clipped(duration_s, predicted_s)
        self._typical.add([value / duration_s for value in (1.0, tokens, context_tokens, sequences)], 1.0)
        self._samples += 1
        self._fitted += 1
        every = REFIT_EVERY if self._fitted < SETTLED_AFTER else REFIT_SETTLED_EVERY
        if self._fitted <= REFIT_EVERY or self._fitted % every == 0:
            self._coefficients = self._typical.fit(_coefficients(self._prior), _UNITS) or self._coefficients

    def predict(self, tokens: int, context_tokens: int, sequences: int) -> float:
        base, per_token, per_context, per_sequence = self._coefficients
        tokens, sequences = padded_shape(self, tokens, sequences)
        return base + per_token * tokens + per_context * context_tokens + per_sequence * sequences

    def to_message(self) -> StepTime:
        return self._message(self._coefficients)

    def mean(self) -> StepTime:
        """Mean step time of the last minutes; as `to_message` while it is unknown."""
        return self._message(self._mean.fit(_coefficients(self._prior), _UNITS) or self._coefficients)

    def _add_to_mean(self, tokens: int, context_tokens: int, sequences: int, duration_s: float) -> None:
        usual_s = predict_step_s(self._prior, tokens, context_tokens, sequences)
        features = (1.0, tokens, context_tokens, sequences)
        self._mean.add([value / usual_s for value in features], duration_s / usual_s)

    def _message(self, coefficients: list[float]) -> StepTime:
        base, per_token, per_context, per_sequence = coefficients
        return StepTime(
            base_s=base,
            per_token_s=per_token,
            per_context_token_s=per_context,
            per_sequence_s=per_sequence,
            samples=self._samples,
            relative_error=self._relative_error,
            graph_sizes=self.graph_sizes,
            mixed_sizes=self.mixed_sizes,
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
        self._typical.clear()
        return duration_s


_UNITS = (1.0, 64.0, 16_384.0, 16.0)
"""Typical size of each feature: makes coefficients comparable."""


def _coefficients(message: StepTime) -> list[float]:
    return [message.base_s, message.per_token_s, message.per_context_token_s, message.per_sequence_s]
