"""Without the extra a setting stops the start, and a variable that may be meant for others does not."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from engine.telemetry import sender
from ops.serving.composition import engine_options, open_tracer, spans_to
from ops.settings.settings import Settings
from ops.settings.telemetry import TelemetrySettings
from tenants.errors import Invalid

URL = "http://127.0.0.1:9"
VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path)


@pytest.fixture
def without_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "PACKAGES", ("not_installed.anywhere",))


@pytest.mark.usefixtures("without_extra")
def test_a_setting_without_the_extra_names_it(settings: Settings) -> None:
    given = replace(settings, telemetry=TelemetrySettings(otlp=URL))
    for work in (spans_to, engine_options, lambda each: open_tracer(each, "gateway")):
        with pytest.raises(Invalid, match=r"telemetry.otlp.*pip install 'fairgate\[otel\]'"):
            work(given)


@pytest.mark.usefixtures("without_extra")
def test_a_variable_without_the_extra_leaves_a_warning(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_tracer(settings, "gateway") is None
    assert caplog.records == [], "nothing is said where nothing is asked for"
    monkeypatch.setenv(VARIABLE, URL)
    with caplog.at_level(logging.WARNING):
        assert open_tracer(settings, "gateway") is None
    assert "pip install 'fairgate[otel]'" in caplog.text
    assert engine_options(settings).otlp == ""


def test_the_engine_is_told_where_its_spans_go(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, URL)
    options = engine_options(settings)
    assert (options.otlp, options.spans_per_s) == (f"{URL}/v1/traces", 300)
    assert type(options).of_arguments(options.arguments()) == options


@pytest.mark.parametrize(
    ("variable", "text"),
    [("OTEL_TRACES_SAMPLER", "of_another_language"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")],
)
def test_variables_that_cannot_be_followed_leave_a_warning_unless_a_setting_asks_for_traces(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    text: str,
) -> None:
    monkeypatch.setenv(VARIABLE, URL)
    monkeypatch.setenv(variable, text)
    with caplog.at_level(logging.WARNING):
        assert open_tracer(settings, "gateway") is None
    assert variable in caplog.text
    given = replace(settings, telemetry=TelemetrySettings(otlp=URL))
    if variable == "OTEL_TRACES_SAMPLER":
        with pytest.raises(Invalid, match=r"telemetry.otlp: OTEL_TRACES_SAMPLER"):
            open_tracer(given, "gateway")
    else:
        assert spans_to(given) is not None, "our own setting says where, and how is http"
