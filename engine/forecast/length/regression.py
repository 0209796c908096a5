"""Second layer of the length forecast: online regression on a request's features.

A linear model of the logarithm of the length, its place and its spread, learned online (AdaGrad, Duchi et al.
2011). The place starts from the median of the sketches. Quantiles by the distribution of what the model
missed by (`residuals.py`): they cannot cross. Conditional on the tokens generated so far. Pure Python: a
gateway has no numpy. Bounded: `PLACES` weights a model.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from array import array
from collections.abc import Sequence
from math import exp, log
from operator import itemgetter, mul
from typing import Any

import msgspec

from engine.forecast.length.features import PLACES, Features, place_of
from engine.forecast.length.residuals import Residuals

PLACE_RATE = 1.0
SPREAD_RATE = 0.5
NOVELTY = place_of("novelty")
NOVELTY_RATE = 0.5
LARGEST_STEP = 2.0
"""Of a residual: one absurd answer does not bend the weights."""
SHARED_FROM = 4.0
"""Sum of squared values from which on a step is shared among its features."""
FIRST_SQUARES = 4.0
"""What the squared gradients start from; keeps the first steps small."""
LEAST_LOG_SPREAD, MOST_LOG_SPREAD = -4.0, 1.5
FIRST_LOG_SPREAD = -0.4
MOST_LOG_LENGTH = 13.8
"""A million tokens."""
ROOM = 0.7
"""Above the logarithm of the longest answer seen: twice as long is foretold at most."""


class Located(msgspec.Struct, frozen=True):
    """Where an answer's logarithmic length is expected, and how far from there it may well be."""

    place: float
    spread: float


class LengthRegression:
    """The model of one served model. One writer: the code that sees answers end."""

    def __init__(self) -> None:
        self.samples = 0
        self._longest = 1
        self._most = MOST_LOG_LENGTH
        """Nothing beyond is foretold: well above the longest answer that was seen."""
        self._place = array("d", bytes(8 * PLACES))
        self._place_squares = array("d", bytes(8 * PLACES))
        self._spread = array("d", bytes(8 * PLACES))
        self._spread_squares = array("d", bytes(8 * PLACES))
        self._residuals = Residuals()

    def locate(self, features: Features, median: float) -> Located:
        """`median`: what the layer below expects."""
        look, values = itemgetter(*features.places, NOVELTY), features.values
        spreads = look(self._spread)
        place = log(median) + sum(map(mul, look(self._place), values))
        spread = FIRST_LOG_SPREAD + sum(map(mul, spreads, values))
        # The last one of those looked up is no feature's: `map` ends before it, and here it is left out.
        spread += _novelty(look(self._place_squares)[:-1].count(0.0), features) * spreads[-1]
        return Located(
            min(max(place, 0.0), self._most), exp(min(max(spread, LEAST_LOG_SPREAD), MOST_LOG_SPREAD))
        )

    def quantiles(self, located: Located, qs: Sequence[float], generated: int = 0) -> list[int]:
        """For each of `qs`, the length that such a share of answers does not exceed, given that `generated`
        tokens are out and more will come: at least `generated + 1`."""
        certain = 1.0
        if generated > 0:
            certain = self._residuals.survival((log(generated + 0.5) - located.place) / located.spread)
        lengths = []
        for q in qs:
            if certain > 1e-6:
                residual = self._residuals.at(certain * (1 - q))
                # Half a token: a length counts as reached from its middle on.
                length = round(exp(min(located.place + residual * located.spread, self._most)))
            else:
                # Longer than all that was ever seen: as much again, the more the surer one wants to be.
                length = round(generated * (1 + q))
            lengths.append(max(length, generated + 1))
        return lengths

    def observe(self, features: Features, located: Located, output_tokens: int) -> None:
        """An answer had `output_tokens`; `located` is what was said of it before."""
        residual = (log(output_tokens) - located.place) / located.spread
        self._residuals.observe(residual)
        self.samples += 1
        self._longest = max(self._longest, output_tokens)
        self._most = min(log(self._longest) + ROOM, MOST_LOG_LENGTH)
        pull = min(max(residual, -LARGEST_STEP), LARGEST_STEP)
        # Of the Laplace likelihood |residual| + log spread, by the logarithm of the spread.
        widen = min(abs(residual), LARGEST_STEP + 1) - 1
        novelty = _novelty(sum(not self._place_squares[index] for index in features.places), features)
        # Many features together move far: the step is shared among them (as in normalised LMS).
        share = 1 / max(1.0, sum(value * value for value in features.values) / SHARED_FROM)
        place_rate, spread_rate = PLACE_RATE * share * located.spread, SPREAD_RATE * share
        for index, value in zip(features.places, features.values, strict=True):
            slope = pull * value
            squares = self._place_squares[index] = self._place_squares[index] + slope * slope
            self._place[index] += place_rate * slope / (FIRST_SQUARES + squares) ** 0.5
            slope = widen * value
            squares = self._spread_squares[index] = self._spread_squares[index] + slope * slope
            self._spread[index] += spread_rate * slope / (FIRST_SQUARES + squares) ** 0.5
        if novelty:
            slope = widen * novelty
            squares = self._spread_squares[NOVELTY] = self._spread_squares[NOVELTY] + slope * slope
            self._spread[NOVELTY] += NOVELTY_RATE * slope / (FIRST_SQUARES + squares) ** 0.5

    def to_dict(self) -> dict[str, Any]:
        arrays = (self._place, self._place_squares, self._spread, self._spread_squares)
        packed = zlib.compress(b"".join(array("f", values).tobytes() for values in arrays), 1)
        return {
            "samples": self.samples,
            "longest": self._longest,
            "weights": base64.b64encode(packed).decode(),
            "residuals": self._residuals.filled(),
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> LengthRegression:
        """The inverse of `to_dict`. Raises ValueError, KeyError or TypeError for anything else."""
        regression = LengthRegression()
        size = 4 * array("f").itemsize * PLACES
        try:
            unpacker = zlib.decompressobj()
            raw = unpacker.decompress(base64.b64decode(data["weights"], validate=True), size + 1)
        except (zlib.error, binascii.Error) as error:
            raise ValueError(f"the weights of a length forecast cannot be read: {error}") from None
        values = array("f")
        if len(raw) != size:
            raise ValueError(f"{len(raw)} bytes of weights, expected {size}")
        values.frombytes(raw)
        if not all(abs(value) < 1e9 for value in values):
            raise ValueError("a weight of a length forecast is no number of a sensible size")
        regression.samples = int(data["samples"])
        regression._longest = max(1, int(data["longest"]))
        if regression.samples:
            regression._most = min(log(regression._longest) + ROOM, MOST_LOG_LENGTH)
        parts = [array("d", values[start * PLACES : (start + 1) * PLACES]) for start in range(4)]
        regression._place, regression._place_squares = parts[0], parts[1]
        regression._spread, regression._spread_squares = parts[2], parts[3]
        regression._residuals = Residuals.of(data["residuals"])
        return regression


def _novelty(unseen: int, features: Features) -> float:
    """By the share of its places that nothing was learned for: the more, the less is known of its kind."""
    return 2 * unseen / len(features.places)
