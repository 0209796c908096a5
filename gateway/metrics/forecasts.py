"""Prometheus collectors of forecast quality: estimates and output lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.forecast.calibration import Calibration, longest_wait_s
from engine.forecast.length.length import LAYERS, LengthForecast
from engine.forecast.length.scores import QUANTILES
from engine.messages import TIER_RANKS, ProbeReport

TIERS = {rank: tier for tier, rank in TIER_RANKS.items()}


class CalibrationCollector(Collector):
    """`fairgate_estimate_coverage{model, figure, level, kind}` should be near its level, the stated quantile;
    `kind` is `plain` (told on arrival), `binding` (redeemed) or `together` (redeemed, quoted beside others of
    its tenant). `fairgate_wait_coverage`: the same of waits, by tier and stated median."""

    def __init__(self, calibrations: Callable[[], Mapping[str, Calibration]]) -> None:
        self._calibrations = calibrations

    def collect(self) -> Iterator[Metric]:
        labels = ["model", "figure", "level", "kind"]
        recent = GaugeMetricFamily(
            "fairgate_estimate_coverage",
            "Share of the last few hundred requests whose figure was no more than its estimate.",
            labels=labels,
        )
        waits = GaugeMetricFamily(
            "fairgate_wait_coverage",
            "Share of the last few hundred waits that were no longer than estimated, by tier and by the upper"
            " end in seconds of the range of waits that the estimated median is in.",
            labels=["model", "tier", "told_up_to", "level", "kind"],
        )
        judged = CounterMetricFamily("fairgate_estimates_judged", "Estimates compared.", labels=labels)
        within = CounterMetricFamily("fairgate_estimates_within", "Of them, not exceeded.", labels=labels)
        for model, calibration in self._calibrations().items():
            for (kind, what, quantile), coverage in calibration.coverage.items():
                values = [model, what, f"{quantile:g}", kind]
                recent.add_metric(values, coverage.recent)
                judged.add_metric(values, coverage.judged)
                within.add_metric(values, coverage.within)
            for (kind, rank, load, quantile), coverage in calibration.wait_coverage.items():
                values = [model, TIERS[rank], f"{longest_wait_s(load):.3g}", f"{quantile:g}", kind]
                waits.add_metric(values, coverage.recent)
        yield from (recent, waits, judged, within)


# Forecasts of answers' lengths, layer by layer.

LABELS = ["model", "layer"]


class LengthCollector(Collector):
    """The figures of `fairgate forecast report` without rank accuracy, which costs milliseconds a model."""

    def __init__(
        self,
        lengths: LengthForecast,
        probes: Callable[[], Mapping[tuple[str, str], ProbeReport]] = dict,
    ) -> None:
        self._lengths = lengths
        self._probes = probes

    def collect(self) -> Iterator[Metric]:
        yield from self._layers()
        yield from self._after_prompts()

    def _after_prompts(self) -> Iterator[Metric]:
        """Of the third layer, which engines have: before is what the same answers were predicted to be."""
        labels = ["model", "replica"]
        used = GaugeMetricFamily(
            "fairgate_length_probe_used",
            "1: what the engine foresees after a prompt corrects what was predicted on arrival.",
            labels=labels,
        )
        judged = CounterMetricFamily("fairgate_length_probe_judged", "Answers compared.", labels=labels)
        loss = GaugeMetricFamily(
            "fairgate_length_probe_pinball_tokens",
            "Mean pinball loss of the forecast on arrival (before) and after the prompt (after).",
            labels=[*labels, "forecast"],
        )
        error = GaugeMetricFamily(
            "fairgate_length_probe_error_tokens", "Mean error of the median.", labels=[*labels, "forecast"]
        )
        for (model, replica), probe in self._probes().items():
            used.add_metric([model, replica], probe.is_used)
            judged.add_metric([model, replica], probe.answers)
            for name, score in (("before", probe.forecast), ("after", probe.probe)):
                if score is not None:
                    loss.add_metric([model, replica, name], score.pinball_tokens)
                    error.add_metric([model, replica, name], score.mean_error_tokens)
        yield from (used, judged, loss, error)

    def _layers(self) -> Iterator[Metric]:
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
            labels=[*LABELS, "level"],
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
