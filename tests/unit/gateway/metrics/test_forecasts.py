"""Metrics of the length forecast: the layers' quality, and the layer in use."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from engine.forecast.length.length import LengthForecast
from engine.forecast.length.scores import QUANTILES
from engine.messages import LengthScore, ProbeReport
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
        assert value("fairgate_length_judged_total", layer) == told["samples"]
        if layer in ("user", "conversation"):
            assert told["samples"] == 0
            assert value("fairgate_length_pinball_tokens", layer) is None
            continue
        assert value("fairgate_length_pinball_tokens", layer) == told["pinball_tokens"]
        assert value("fairgate_length_coverage", layer, level="0.9") == told["p90_coverage"]
        for q in QUANTILES:
            assert value("fairgate_length_coverage", layer, level=f"{q:g}") is not None
    assert (value("fairgate_length_used", "sketches"), value("fairgate_length_used", "features")) == (0, 1)


def test_a_probe_stands_beside_what_was_predicted_before_it_read() -> None:
    probe = ProbeReport(
        "on", "", 300, 1, True, 40, LengthScore(2.0, 6.0, 0.9, 0.8), LengthScore(1.0, 3.0, 0.9, 0.9)
    )
    registry = CollectorRegistry()
    registry.register(
        LengthCollector(LengthForecast(), lambda: {("m", "a"): probe, ("m", "b"): ProbeReport("on")})
    )

    def value(name: str, replica: str, **labels: str) -> float | None:
        return registry.get_sample_value(
            f"fairgate_length_probe_{name}", {"model": "m", "replica": replica, **labels}
        )

    assert (value("used", "a"), value("used", "b")) == (1, 0)
    assert value("judged_total", "a") == 40
    assert [value("pinball_tokens", "a", forecast=each) for each in ("before", "after")] == [2.0, 1.0]
    assert [value("error_tokens", "a", forecast=each) for each in ("before", "after")] == [6.0, 3.0]
    assert value("error_tokens", "b", forecast="after") is None


def test_a_forecast_that_has_seen_nothing_has_no_figures() -> None:
    registry = CollectorRegistry()
    registry.register(LengthCollector(LengthForecast()))
    labels = {"model": "m", "layer": "sketches"}
    assert registry.get_sample_value("fairgate_length_judged_total", labels) is None
