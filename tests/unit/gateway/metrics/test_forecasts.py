"""Metrics of the length forecast: the layers' quality, and the layer in use."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from engine.forecast.length.length import LengthForecast
from engine.forecast.length.scores import QUANTILES
from gateway.metrics.forecasts import LengthCollector
from tests.unit.engine.forecast.length.test_layers import learned


def test_every_layer_of_every_model_has_its_figures() -> None:
    forecast = learned(800)
    registry = CollectorRegistry()
    registry.register(LengthCollector(forecast))

    def value(name: str, layer: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model": "m", "layer": layer, **labels})

    report = forecast.report()["m"]["layers"]
    for layer, told in report.items():
        assert value("fairgate_length_judged_total", layer) == told["samples"] > 0
        assert value("fairgate_length_pinball_tokens", layer) == told["pinball_tokens"]
        assert value("fairgate_length_coverage", layer, quantile="0.9") == told["p90_coverage"]
        for q in QUANTILES:
            assert value("fairgate_length_coverage", layer, quantile=f"{q:g}") is not None
    assert (value("fairgate_length_used", "sketches"), value("fairgate_length_used", "features")) == (0, 1)


def test_a_forecast_that_has_seen_nothing_has_no_figures() -> None:
    registry = CollectorRegistry()
    registry.register(LengthCollector(LengthForecast()))
    labels = {"model": "m", "layer": "sketches"}
    assert registry.get_sample_value("fairgate_length_judged_total", labels) is None
