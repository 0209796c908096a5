"""First layer of the length forecast: decaying histograms of past answers.

One for each (tenant, model) and each model, over buckets that are exact for short answers and 10 % wide for
long ones. A tenant with few samples borrows from its model, a model from a prior. Everything is conditional
on the tokens generated so far. Pure; the tenants seen longest ago are forgotten first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import exp, log
from operator import neg, sub
from typing import Any

MAX_SKETCHES = 4096
DECAY = 0.995
"""Weight of the past per observation: about 200 observations count."""
TENANT_BORROWS = 8.0
"""Samples that a model's distribution is worth in a tenant's."""
MODEL_BORROWS = 4.0
"""Samples that the prior is worth in a model's distribution."""
MAX_QUANTILES = 64
EXACT = 16
"""Lengths up to here have a bucket each."""
GROWTH = 1.1
LONGEST = 1_000_000
PRIOR_MEDIAN = 64.0
PRIOR_SIGMA = 1.2


def _make_tops() -> list[int]:
    tops = list(range(1, EXACT + 1))
    while tops[-1] < LONGEST:
        tops.append(max(tops[-1] + 1, int(tops[-1] * GROWTH)))
    return tops


TOPS = _make_tops()
"""The longest length of each bucket; bucket i holds the lengths above TOPS[i - 1]."""


def _make_prior() -> list[float]:
    weights = []
    for index, top in enumerate(TOPS):
        bottom = TOPS[index - 1] if index else 0
        distance = (log((top + bottom + 1) / 2) - log(PRIOR_MEDIAN)) / PRIOR_SIGMA
        weights.append((log(top + 0.5) - log(bottom + 0.5)) * exp(-distance * distance / 2))
    total = sum(weights)
    return [weight / total for weight in weights]


PRIOR = _make_prior()


@dataclass(slots=True)
class Sketch:
    """A decaying histogram of lengths."""

    weights: list[float] = field(default_factory=lambda: [0.0] * len(TOPS))
    total: float = 0.0
    samples: int = 0
    """Ever observed, undecayed."""
    step: float = 1.0
    """Weight of the next observation: growing it is cheaper than decaying all the others."""

    def observe(self, length: int) -> None:
        """Counts one answer."""
        self.weights[min(bisect_left(TOPS, length), len(TOPS) - 1)] += self.step
        self.total += self.step
        self.samples += 1
        self.step /= DECAY
        if self.step > 1e12:
            self.weights = [weight / self.step for weight in self.weights]
            self.total /= self.step
            self.step = 1.0

    def carried(self, most: float) -> Sketch:
        """A new one with this one's distribution, worth `most` samples at most."""
        share = min(1.0, most * self.step / self.total) / self.step if self.total else 0.0
        weights = [weight * share for weight in self.weights]
        return Sketch(weights, sum(weights), self.samples)

    def blended(self, fallback: list[float], borrows: float) -> list[float]:
        """Its distribution, with `fallback` (which sums to 1) worth `borrows` samples."""
        borrowed = borrows * self.step
        total = self.total + borrowed
        return [
            (weight + borrowed * other) / total for weight, other in zip(self.weights, fallback, strict=True)
        ]


@dataclass(slots=True)
class _Blend:
    """A tenant's distribution, computed once for many questions."""

    tenant_samples: int
    model_samples: int
    survival: list[float]
    """Share of answers longer than TOPS[i - 1]; one entry more than there are buckets."""
    quantiles: dict[float, int] = field(default_factory=dict)
    """Those that were asked for at the start of an answer, as most are."""


class LengthSketches:
    """Quantiles of the output length, whatever was asked. One writer: the code that sees answers end."""

    def __init__(self, *, max_sketches: int = MAX_SKETCHES) -> None:
        if max_sketches < 1:
            raise ValueError(f"max_sketches must be at least 1, not {max_sketches}")
        self._max_sketches = max_sketches
        self._tenants: dict[tuple[str, str], Sketch] = {}
        self._models: dict[str, Sketch] = {}
        self._blends: dict[tuple[str, str], _Blend] = {}

    def observe(self, tenant_id: str, model_id: str, output_tokens: int) -> None:
        """An answer ended after `output_tokens`, its end-of-sequence token included; 0 says nothing."""
        if output_tokens < 1:
            return
        key = (tenant_id, model_id)
        # Taken out and put back: the dictionary's order is that of the last observations.
        sketch = self._tenants.pop(key, None) or Sketch()
        sketch.observe(output_tokens)
        self._tenants[key] = sketch
        model = self._models.pop(model_id, None) or Sketch()
        model.observe(output_tokens)
        self._models[model_id] = model
        while len(self._tenants) > self._max_sketches:
            oldest = next(iter(self._tenants))
            del self._tenants[oldest]
            self._blends.pop(oldest, None)
        while len(self._models) > self._max_sketches:
            del self._models[next(iter(self._models))]

    def samples(self, tenant_id: str, model_id: str) -> int:
        """Answers of this tenant that were seen; 0: forecasts come from the model's or the prior."""
        sketch = self._tenants.get((tenant_id, model_id))
        return sketch.samples if sketch is not None else 0

    def model_samples(self, model_id: str) -> int:
        """Answers of this model that were seen; 0: forecasts come from the prior."""
        sketch = self._models.get(model_id)
        return sketch.samples if sketch is not None else 0

    def quantiles(self, tenant_id: str, model_id: str, qs: Sequence[float], generated: int = 0) -> list[int]:
        """For each of `qs`, the length that such a share of answers does not exceed, given that `generated`
        tokens are out and more will come: at least `generated + 1`."""
        blend = self._blend(tenant_id, model_id)
        if generated <= 0:
            known = blend.quantiles
            if len(known) > MAX_QUANTILES:
                known.clear()
            for q in qs:
                if q not in known:
                    known[q] = _quantile(blend.survival, 1.0, q, 0)
            return [known[q] for q in qs]
        certain = _survives(blend.survival, generated)
        return [_quantile(blend.survival, certain, q, generated) for q in qs]

    def quantile(self, tenant_id: str, model_id: str, q: float, generated: int = 0) -> int:
        """One of `quantiles`."""
        return self.quantiles(tenant_id, model_id, (q,), generated)[0]

    def quantiles_of(
        self,
        sketch: Sketch,
        borrows: float,
        tenant_id: str,
        model_id: str,
        qs: Sequence[float],
        generated: int = 0,
    ) -> list[int]:
        """As `quantiles`, of a group of the tenant's answers whose `sketch` borrows from the tenant."""
        survival = self._blend(tenant_id, model_id).survival
        shares = [above - below for above, below in pairwise(survival)]
        of_group = _survival(sketch.blended(shares, borrows))
        certain = _survives(of_group, generated)
        return [_quantile(of_group, certain, q, generated) for q in qs]

    def expected(
        self, tenant_id: str, model_id: str, generated: int = 0, max_tokens: int | None = None
    ) -> float:
        """The mean length under the same conditions."""
        survival = self._blend(tenant_id, model_id).survival
        certain = _survives(survival, generated)
        if certain <= 0:
            median = self.quantile(tenant_id, model_id, 0.5, generated)
            return float(median if max_tokens is None else min(median, max(1, max_tokens)))
        longest = TOPS[-1] if max_tokens is None else max(max_tokens, generated + 1)
        mean = float(generated)
        bottom = 0
        for index, top in enumerate(TOPS):
            low, high = max(bottom, generated), min(top, longest)
            if high > low:
                # The expected length is the integral of the survival; it is straight within a bucket.
                mean += (high - low) * (_survives(survival, low) + _survives(survival, high)) / 2 / certain
                mean += (high - low) * _step_excess(survival, index) / certain
            bottom = top
            if bottom >= longest:
                break
        return min(max(mean, generated + 1.0), float(longest))

    def to_dict(self) -> dict[str, Any]:
        return {
            "models": [[model_id, _pack(sketch)] for model_id, sketch in self._models.items()],
            "tenants": [[*key, _pack(sketch)] for key, sketch in self._tenants.items()],
        }

    @staticmethod
    def from_dict(data: dict[str, Any], *, max_sketches: int = MAX_SKETCHES) -> LengthSketches:
        """The inverse of `to_dict`. Raises ValueError, KeyError or TypeError for anything else."""
        sketches = LengthSketches(max_sketches=max_sketches)
        for model_id, packed in data["models"][-max_sketches:]:
            sketches._models[str(model_id)] = _unpack(packed)
        for tenant_id, model_id, packed in data["tenants"][-max_sketches:]:
            sketches._tenants[str(tenant_id), str(model_id)] = _unpack(packed)
        return sketches

    def _blend(self, tenant_id: str, model_id: str) -> _Blend:
        key = (tenant_id, model_id)
        tenant = self._tenants.get(key)
        model = self._models.get(model_id)
        tenant_samples = tenant.samples if tenant is not None else 0
        model_samples = model.samples if model is not None else 0
        blend = self._blends.get(key)
        # A distribution moves slowly: 2 % more samples of a tenant, 5 % more of a model make no new blend.
        if (
            blend is not None
            and blend.tenant_samples <= tenant_samples <= blend.tenant_samples * 1.02
            and blend.model_samples <= model_samples <= blend.model_samples * 1.05
        ):
            return blend
        shares = PRIOR if model is None else model.blended(PRIOR, MODEL_BORROWS)
        if tenant is not None:
            shares = tenant.blended(shares, TENANT_BORROWS)
        survival = _survival(shares)
        if len(self._blends) >= self._max_sketches:
            self._blends.clear()
        blend = self._blends[key] = _Blend(tenant_samples, model_samples, survival)
        return blend


def _survival(shares: Iterable[float]) -> list[float]:
    """The share of answers longer than TOPS[i - 1], by the shares of the buckets."""
    survival = list(accumulate(shares, sub, initial=1.0))
    # It falls, at its end by rounding to a little less than nothing.
    for index in range(len(survival) - 1, -1, -1):
        if survival[index] >= 0:
            break
        survival[index] = 0.0
    return survival


def _quantile(survival: list[float], certain: float, q: float, generated: int) -> int:
    """The length that such a share of the answers, of which `certain` are longer than `generated`, does not
    exceed."""
    target = certain * (1 - q)
    # Survival falls, its negative rises: find the bucket in which it crosses the target.
    index = bisect_left(survival, -target, key=neg)
    length = _length_at(survival, min(max(index, 1), len(TOPS)) - 1, target)
    return max(length, generated + 1)


def _survives(survival: list[float], length: int) -> float:
    """The share of answers longer than `length`."""
    if length <= 0:
        return 1.0
    index = bisect_left(TOPS, length)
    if index >= len(TOPS):
        return 0.0
    bottom = TOPS[index - 1] if index else 0
    part = (length - bottom) / (TOPS[index] - bottom)
    return survival[index] + (survival[index + 1] - survival[index]) * part


def _length_at(survival: list[float], index: int, target: float) -> int:
    """Where within bucket `index` the survival has fallen to `target`."""
    bottom = TOPS[index - 1] if index else 0
    fall = survival[index] - survival[index + 1]
    part = (survival[index] - target) / fall if fall > 0 else 1.0
    return bottom + max(1, round(part * (TOPS[index] - bottom)))


def _step_excess(survival: list[float], index: int) -> float:
    """Lengths are whole: the mean of a bucket lies half a token above that of the straight line."""
    bottom = TOPS[index - 1] if index else 0
    return (survival[index] - survival[index + 1]) / (TOPS[index] - bottom) / 2


def _pack(sketch: Sketch) -> dict[str, Any]:
    filled = [[index, weight / sketch.step] for index, weight in enumerate(sketch.weights) if weight > 0]
    return {"samples": sketch.samples, "filled": filled}


def _unpack(packed: dict[str, Any]) -> Sketch:
    sketch = Sketch(samples=int(packed["samples"]))
    for index, weight in _filled(packed):
        sketch.weights[index] = weight
        sketch.total += weight
    return sketch


def _filled(packed: dict[str, Any]) -> Iterator[tuple[int, float]]:
    for index, weight in packed["filled"]:
        if not (0 <= int(index) < len(TOPS) and 0 < float(weight) < 1e12):
            raise ValueError(f"not a length forecast: bucket {index!r} with weight {weight!r}")
        yield int(index), float(weight)
