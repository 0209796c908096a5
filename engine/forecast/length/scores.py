"""Scores of length forecasts: pinball loss, coverage and rank accuracy.

Pinball loss (Koenker and Bassett 1978) of a quantile is the one that its true value minimises; it is in
tokens. Rank accuracy is concordance: of two answers of unlike length, how often was the longer one expected
to be longer; it is what an order by predicted length lives on (vLLM-LTR, arXiv 2408.15792). Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

QUANTILES = (0.5, 0.7, 0.9, 0.95)
"""The quantiles that a forecast is judged by; the median first."""
HIGH = QUANTILES.index(0.9)
KEPT_PAIRS = 128
"""Last (forecast, actual) pairs that rank accuracy is computed from."""


def pinball_tokens(lengths: Sequence[float], actual: float) -> float:
    """The mean loss of forecast `lengths`, one for each of `QUANTILES`."""
    loss = 0.0
    for q, length in zip(QUANTILES, lengths, strict=True):
        loss += q * (actual - length) if actual >= length else (1 - q) * (length - actual)
    return loss / len(QUANTILES)


def concordance(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Of all two (forecast, actual) with unlike actual lengths: the share in which the forecasts stand in the
    same order, equal forecasts counting half. None: there are no such two."""
    known = list(pairs)
    right = total = 0.0
    for index, (forecast, actual) in enumerate(known):
        for other_forecast, other_actual in known[:index]:
            if actual == other_actual:
                continue
            total += 1
            if forecast == other_forecast:
                right += 0.5
            else:
                right += (forecast > other_forecast) == (actual > other_actual)
    return right / total if total else None


@dataclass(slots=True)
class LayerScore:
    samples: int = 0
    pinball_sum_tokens: float = 0.0
    error_sum_tokens: float = 0.0
    covered: list[int] = field(default_factory=lambda: [0] * len(QUANTILES))
    """Answers that did not exceed each quantile."""
    pairs: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT_PAIRS))

    def observe(self, lengths: Sequence[float], actual: float) -> float:
        """Counts one answer; returns its pinball loss."""
        loss = pinball_tokens(lengths, actual)
        self.samples += 1
        self.pinball_sum_tokens += loss
        self.error_sum_tokens += abs(actual - lengths[0])
        for index, length in enumerate(lengths):
            self.covered[index] += actual <= length
        self.pairs.append((lengths[0], actual))
        return loss

    def report(self) -> dict[str, float | int | None]:
        """Plain values, fit for JSON; None where nothing was seen."""
        count = self.samples
        return {
            "samples": count,
            "pinball_tokens": self.pinball_sum_tokens / count if count else None,
            "mean_error_tokens": self.error_sum_tokens / count if count else None,
            "p50_coverage": self.covered[0] / count if count else None,
            "p90_coverage": self.covered[HIGH] / count if count else None,
            "rank_accuracy": concordance(self.pairs),
        }
