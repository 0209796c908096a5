"""How good are the forecasts of answers' lengths, layer by layer? For Prometheus, read when it asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.forecast.length.length import LAYERS, LengthForecast
from engine.forecast.length.scores import QUANTILES

LABELS = ["model", "layer"]


class LengthCollector(Collector):
    """What `fairgate forecast report` tells, but for rank accuracy, which costs milliseconds a model."""

    def __init__(self, lengths: LengthForecast) -> None:
        self._lengths = lengths

    def collect(self) -> Iterator[Metric]:
        """The families, as they are now."""
        judged = CounterMetricFamily(
            "fairgate_length_judged", "Answers that a layer's forecast was compared with.", labels=LABELS
        )
        loss = GaugeMetricFamily(
            "fairgate_length_pinball_tokens",
            "Mean pinball loss of a layer's quantiles: the layer with the least is the best.",
            labels=LABELS,
        )
        coverage = GaugeMetricFamily(
            "fairgate_length_coverage",
            "Share of the answers that were no longer than a layer's quantile.",
            labels=[*LABELS, "quantile"],
        )
        used = GaugeMetricFamily("fairgate_length_used", "1: this layer answers.", labels=LABELS)
        for model, scores in self._lengths.scores.items():
            answering = self._lengths.gate.layer(model, model)
            for number, (layer, score) in enumerate(zip(LAYERS, scores, strict=True)):
                used.add_metric([model, layer], number == answering)
                judged.add_metric([model, layer], score.samples)
                if score.samples:
                    loss.add_metric([model, layer], score.pinball_sum_tokens / score.samples)
                    for q, covered in zip(QUANTILES, score.covered, strict=True):
                        coverage.add_metric([model, layer, f"{q:g}"], covered / score.samples)
        yield from (judged, loss, coverage, used)
