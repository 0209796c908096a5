"""Forecast of an answer's length in tokens: quantiles, conditional on the tokens generated so far.

Layers: what answers of this tenant and model were like (`histograms.py`), what this request says of itself
(`features.py`, `regression.py`), what answers to its end user and in its conversation were like
(`groups.py`). A gate (`gate.py`) picks the best of those that have something to say. One more layer reads the
model's own state and lives in the engine (`probe.py`). Pure; bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.forecast.length.features import Features
from engine.forecast.length.gate import LayerGate
from engine.forecast.length.groups import BORROWS, GroupSketches
from engine.forecast.length.histograms import LONGEST, MAX_SKETCHES, PRIOR, TOPS, LengthSketches, Sketch
from engine.forecast.length.regression import LengthRegression
from engine.forecast.length.scores import QUANTILES, LayerScore

__all__ = ["LAYERS", "LONGEST", "PRIOR", "TOPS", "Features", "LengthForecast"]

LAYERS = ("sketches", "features", "user", "conversation")
MAX_MODELS = 64
"""Served models that have weights of their own; those heard of longest ago are forgotten first."""
VERSION = 2


class LengthForecast:
    """Quantiles of the output length. One writer: the code that sees answers end."""

    def __init__(self, *, max_sketches: int = MAX_SKETCHES) -> None:
        self.sketches = LengthSketches(max_sketches=max_sketches)
        self.gate = LayerGate(len(LAYERS), max_keys=max_sketches)
        self.users = GroupSketches(max_sketches)
        self.conversations = GroupSketches(max_sketches)
        self._regressions: dict[str, LengthRegression] = {}
        self._scores: dict[str, tuple[LayerScore, ...]] = {}

    def observe(
        self,
        tenant_id: str,
        model_id: str,
        output_tokens: int,
        features: Features | None = None,
        *,
        judge: bool = True,
    ) -> None:
        """An answer ended after `output_tokens`, its end-of-sequence token included; 0 says nothing. To count
        it takes some microseconds; to judge all layers by it, and to learn from `features`, some 0.1 ms."""
        if output_tokens < 1:
            return
        if features is not None:
            if judge:
                self._judge(tenant_id, model_id, output_tokens, features)
            if features.user:
                self.users.observe(tenant_id, model_id, features.user, output_tokens)
            if features.blocks:
                begun = self.conversations.find(tenant_id, model_id, reversed(features.blocks))
                self.conversations.observe(tenant_id, model_id, features.blocks[-1], output_tokens, begun)
        self.sketches.observe(tenant_id, model_id, output_tokens)

    def samples(self, tenant_id: str, model_id: str) -> int:
        return self.sketches.samples(tenant_id, model_id)

    def model_samples(self, model_id: str) -> int:
        return self.sketches.model_samples(model_id)

    def layer(self, tenant_id: str, model_id: str) -> str:
        """Which of `LAYERS` answers for a request with features."""
        return LAYERS[self.gate.layer((tenant_id, model_id), model_id)]

    def quantiles(
        self,
        tenant_id: str,
        model_id: str,
        qs: Sequence[float],
        generated: int = 0,
        max_tokens: int | None = None,
        features: Features | None = None,
    ) -> list[int]:
        """For each of `qs`, the length that such a share of answers does not exceed, given that `generated`
        tokens are out and more will come: at least `generated + 1`, at most `max_tokens`. Raises ValueError
        unless 0 <= q <= 1 for each of them."""
        for q in qs:
            if not 0 <= q <= 1:
                raise ValueError(f"q must be between 0 and 1, not {q}")
        lengths = self._by_best_layer(tenant_id, model_id, qs, features, generated)
        if max_tokens is None:
            return lengths
        most = max(1, max_tokens)
        return [min(length, most) for length in lengths]

    def _by_best_layer(
        self, tenant_id: str, model_id: str, qs: Sequence[float], features: Features | None, generated: int
    ) -> list[int]:
        if features is None:
            return self.sketches.quantiles(tenant_id, model_id, qs, generated)
        groups = self._groups(tenant_id, model_id, features)
        speaking = (0, 1, *(2 + index for index, sketch in enumerate(groups) if sketch is not None))
        layer = self.gate.layer((tenant_id, model_id), model_id, speaking)
        if layer == 0:
            return self.sketches.quantiles(tenant_id, model_id, qs, generated)
        if layer == 1:
            return self.by_features(tenant_id, model_id, qs, features, generated)
        sketch = groups[layer - 2]
        assert sketch is not None, "it speaks"
        return self.sketches.quantiles_of(sketch, BORROWS, tenant_id, model_id, qs, generated)

    def _groups(self, tenant_id: str, model_id: str, features: Features) -> tuple[Sketch | None, ...]:
        """What is known of its end user and of its conversation, in the order of the layers."""
        return (
            self.users.find(tenant_id, model_id, (features.user,)) if features.user else None,
            self.conversations.find(tenant_id, model_id, reversed(features.blocks)),
        )

    def by_features(
        self, tenant_id: str, model_id: str, qs: Sequence[float], features: Features, generated: int = 0
    ) -> list[int]:
        """What the second layer says, whether the gate lets it through or not; without weights of its own as
        the first one does."""
        regression = self._regressions.get(model_id)
        if regression is None:
            return self.sketches.quantiles(tenant_id, model_id, qs, generated)
        median = self.sketches.quantile(tenant_id, model_id, 0.5)
        return regression.quantiles(regression.locate(features, median), qs, generated)

    def quantile(
        self,
        tenant_id: str,
        model_id: str,
        q: float,
        generated: int = 0,
        max_tokens: int | None = None,
        features: Features | None = None,
    ) -> int:
        return self.quantiles(tenant_id, model_id, (q,), generated, max_tokens, features)[0]

    def expected(
        self, tenant_id: str, model_id: str, generated: int = 0, max_tokens: int | None = None
    ) -> float:
        return self.sketches.expected(tenant_id, model_id, generated, max_tokens)

    @property
    def scores(self) -> Mapping[str, tuple[LayerScore, ...]]:
        """By model: how well each of `LAYERS` did since the start (a view: it changes)."""
        return self._scores

    def report(self) -> dict[str, Any]:
        """By model: how well each layer did on the answers that ended, and which one is used. Rank accuracy
        costs milliseconds: not for the hot path."""
        return {
            model_id: {
                **self.gate.report(model_id),
                "layers": {name: score.report() for name, score in zip(LAYERS, scores, strict=True)},
            }
            for model_id, scores in self._scores.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON, with a report for people. What the gate knows is learned again within
        some dozen answers."""
        return {
            "version": VERSION,
            **self.sketches.to_dict(),
            "report": self.report(),
            "regressions": [
                [model_id, regression.to_dict()] for model_id, regression in self._regressions.items()
            ],
        }

    @staticmethod
    def from_dict(data: dict[str, Any], *, max_sketches: int = MAX_SKETCHES) -> LengthForecast:
        """The inverse of `to_dict`; reads version 1, which knew only sketches, too. Raises ValueError for
        anything else."""
        forecast = LengthForecast(max_sketches=max_sketches)
        try:
            if data["version"] not in (1, VERSION):
                raise ValueError(f"version {data['version']!r} of a length forecast is not known")
            forecast.sketches = LengthSketches.from_dict(data, max_sketches=max_sketches)
            for model_id, packed in data.get("regressions", [])[-MAX_MODELS:]:
                forecast._regressions[str(model_id)] = LengthRegression.from_dict(packed)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"not a length forecast: {error!r}") from None
        return forecast

    def _judge(self, tenant_id: str, model_id: str, output_tokens: int, features: Features) -> None:
        """Every layer says what it would have said, then learns: no layer is judged by an answer that it
        has learned from."""
        lengths = self.sketches.quantiles(tenant_id, model_id, QUANTILES)
        # Taken out and put back: the dictionary's order is that of the last observations.
        regression = self._regressions.pop(model_id, None) or LengthRegression()
        self._regressions[model_id] = regression
        located = regression.locate(features, lengths[0])
        said = [
            lengths,
            regression.quantiles(located, QUANTILES),
            *(
                self.sketches.quantiles_of(sketch, BORROWS, tenant_id, model_id, QUANTILES)
                if sketch is not None
                else None
                for sketch in self._groups(tenant_id, model_id, features)
            ),
        ]
        scores = self._scores.setdefault(model_id, tuple(LayerScore() for _ in LAYERS))
        losses = [
            score.observe(lengths, output_tokens) if lengths is not None else None
            for score, lengths in zip(scores, said, strict=True)
        ]
        self.gate.observe((tenant_id, model_id), model_id, losses)
        regression.observe(features, located, output_tokens)
        if len(self._regressions) > MAX_MODELS:
            oldest = next(iter(self._regressions))
            del self._regressions[oldest]
            self._scores.pop(oldest, None)
