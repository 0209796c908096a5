"""Third layer of the length forecast: combines a probe of the model's state with the prior.

The probe (`engine/model/length_probe/probe.py`) says how likely each range of *remaining* lengths is, as
TRAIL (arXiv 2410.01035) and ARES (arXiv 2510.13668). The prior is the forecast that came with the request,
median and 90th percentile as a Laplace distribution of the length's logarithm, cut off at the tokens that are
out. Both are multiplied (Bayes' rule). Pure, without torch or numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

EXACT = 8
"""Remaining lengths up to here have a range each."""
GROWTH = 1.25
LONGEST = 16_384
LEAST_SPREAD = 0.03
"""Of the prior: no forecast is surer than that."""
UNSURE = 0.02
"""How far the prior may be quite wrong: spread evenly over all ranges."""
P90_IN_SCALES = 1.6094379
"""log 5: where a Laplace distribution of scale 1 has its 90th percentile."""


def _make_tops() -> list[int]:
    tops = list(range(1, EXACT + 1))
    while tops[-1] < LONGEST:
        tops.append(int(tops[-1] * GROWTH) + 1)
    return tops


TOPS = _make_tops()
"""The most remaining tokens of each range; one more range holds all beyond."""
RANGES = len(TOPS) + 1


def range_of(remaining_tokens: int) -> int:
    """The range of a remaining length, which is at least 1: the token about to come counts."""
    for index, top in enumerate(TOPS):
        if remaining_tokens <= top:
            return index
    return len(TOPS)


def prior_of(median: float, high: float, generated: int) -> list[float]:
    """The chances of each range of remaining lengths after `generated` tokens, by a forecast of the whole
    length's median and 90th percentile; 0 for `high`: it is twice the median."""
    place, scale = _laplace(median, high)
    below = _share_below(generated, place, scale)
    left = 1.0 - below
    even = UNSURE / RANGES
    chances = []
    for top in TOPS:
        up_to = _share_below(generated + top, place, scale)
        # Longer than all it expected: a prior that has failed says nothing.
        share = (up_to - below) / left if left > 1e-9 else 1.0 / RANGES
        chances.append((1 - UNSURE) * share + even)
        below = up_to if left > 1e-9 else below
    rest = (1.0 - below) / left if left > 1e-9 else 1.0 / RANGES
    chances.append((1 - UNSURE) * rest + even)
    return chances


def length_quantile(median: float, high: float, generated: int, q: float) -> int:
    """The whole length that a share `q` of answers with such a forecast does not exceed, given that
    `generated` tokens are out and more will come: at least `generated + 1`."""
    place, scale = _laplace(median, high)
    above = max(1e-9, 1.0 - q)
    if log(generated + 0.5) >= place:
        # Beyond the median the rest is the same share of what is out, however much that is.
        return max(generated + 1, round((generated + 0.5) * exp(-scale * log(above)) - 0.5))
    above *= 1.0 - _share_below(generated, place, scale)
    distance = -log(2 * above) if above < 0.5 else log(2 * max(1e-9, 1.0 - above))
    return max(generated + 1, round(exp(place + scale * distance) - 0.5))


def remaining_quantiles(logits: Sequence[float], prior: Sequence[float], qs: Sequence[float]) -> list[int]:
    """For each of `qs` (rising), the remaining length that such a share does not exceed, by the probe's
    `logits` and the prior's chances of each range. At least 1. Raises ValueError unless there is one of each
    for every range."""
    if len(logits) != RANGES or len(prior) != RANGES:
        raise ValueError(f"expected {RANGES} ranges, not {len(logits)} and {len(prior)}")
    highest = max(logits)
    weights = [exp(logit - highest) * chance for logit, chance in zip(logits, prior, strict=True)]
    return _quantiles(weights, qs)


def prior_quantiles(prior: Sequence[float], qs: Sequence[float]) -> list[int]:
    """The same by the prior alone."""
    return _quantiles(prior, qs)


def _quantiles(weights: Sequence[float], qs: Sequence[float]) -> list[int]:
    total = sum(weights)
    lengths: list[int] = []
    passed, index = 0.0, 0
    for q in qs:
        target = q * total
        while index < len(weights) - 1 and passed + weights[index] < target:
            passed += weights[index]
            index += 1
        bottom = TOPS[index - 1] if index else 0
        top = TOPS[index] if index < len(TOPS) else 2 * TOPS[-1]
        part = (target - passed) / weights[index] if weights[index] > 0 else 1.0
        lengths.append(max(1, bottom + max(1, round(min(part, 1.0) * (top - bottom)))))
    return lengths


def _laplace(median: float, high: float) -> tuple[float, float]:
    """Place and scale of the logarithm of a length; 0 for `high`: it is twice the median."""
    place = log(max(1.0, median))
    spread = max(LEAST_SPREAD, log(max(high or 2 * median, median, 1.0)) - place)
    return place, max(LEAST_SPREAD, spread / P90_IN_SCALES)


def _share_below(length: float, place: float, scale: float) -> float:
    """The share of lengths up to `length`; half a token, because lengths are whole."""
    if length <= 0:
        return 0.0
    distance = (log(length + 0.5) - place) / scale
    return exp(distance) / 2 if distance < 0 else 1.0 - exp(-distance) / 2
