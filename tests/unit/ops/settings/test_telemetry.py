"""Where spans go and which ratio is kept, by our settings and by OpenTelemetry's variables."""

from __future__ import annotations

import pytest

from ops.settings.settings import BadSetting, load
from ops.settings.telemetry import BadTelemetry, TelemetrySettings, span_target, trace_ratio

BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
OURS = "http://ours:4318"


@pytest.mark.parametrize(
    ("otlp", "environment", "endpoint"),
    [
        ("", {}, None),
        (OURS, {}, f"{OURS}/v1/traces"),
        (f"{OURS}/", {}, f"{OURS}/v1/traces"),
        (f"{OURS}/otlp/v1/traces", {}, f"{OURS}/otlp/v1/traces"),
        (OURS, {BASE: "http://theirs", TRACES: "http://theirs/x"}, f"{OURS}/v1/traces"),
        (OURS, {"OTEL_SDK_DISABLED": "true"}, f"{OURS}/v1/traces"),
        ("", {BASE: "http://theirs:4318"}, "http://theirs:4318/v1/traces"),
        ("", {BASE: "http://theirs:4318", TRACES: "https://t/x"}, "https://t/x"),
        ("", {BASE: "http://theirs", "OTEL_SDK_DISABLED": "TRUE"}, None),
        ("", {BASE: "http://theirs", "OTEL_TRACES_EXPORTER": "none"}, None),
        ("", {BASE: "http://theirs", "OTEL_TRACES_EXPORTER": "otlp"}, "http://theirs/v1/traces"),
        ("", {BASE: "http://t", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http://t/v1/traces"),
    ],
)
def test_where_spans_go(otlp: str, environment: dict[str, str], endpoint: str | None) -> None:
    target = span_target(TelemetrySettings(otlp=otlp, spans_per_s=7, max_waiting=9), environment)
    assert (None if target is None else target.endpoint) == endpoint
    if target is not None:
        assert (target.spans_per_s, target.max_waiting) == (7, 9)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({BASE: "http://t", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL is grpc"),
        ({BASE: "t:4317"}, "must be an http or https URL"),
        ({BASE: "http://user:secret@t"}, "OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_variables_that_cannot_be_followed_are_named_without_their_secrets(
    environment: dict[str, str], named: str
) -> None:
    with pytest.raises(BadTelemetry, match=named) as error:
        span_target(TelemetrySettings(), environment)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("environment", "is_given", "ratio"),
    [
        ({}, False, 0.25),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, False, 1.0),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, False, 0.0),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, True, 0.25),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"}, False, 0.5),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}, False, 1.0),
    ],
)
def test_the_ratio(environment: dict[str, str], is_given: bool, ratio: float) -> None:
    assert trace_ratio(TelemetrySettings(trace_ratio=0.25), environment, is_given=is_given) == ratio


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_TRACES_SAMPLER": "jaeger_remote"},
        {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "1.5"},
        {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "many"},
    ],
)
def test_a_sampler_that_is_unknown_is_named(environment: dict[str, str]) -> None:
    with pytest.raises(BadTelemetry, match="OTEL_TRACES_SAMPLER"):
        trace_ratio(TelemetrySettings(), environment, is_given=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FAIRGATE_TELEMETRY_OTLP", "collector:4318"),
        ("FAIRGATE_TELEMETRY_OTLP", "http://user:secret@collector"),
        ("FAIRGATE_TELEMETRY_OTLP", "http://collector/?a=1"),
        ("FAIRGATE_TELEMETRY_TRACE_RATIO", "1.1"),
        ("FAIRGATE_TELEMETRY_SPANS_PER_S", "0"),
        ("FAIRGATE_TELEMETRY_WAITING_TRACES", "1"),
    ],
)
def test_bad_settings_stop_the_start(name: str, value: str) -> None:
    with pytest.raises(BadSetting, match=name):
        load({}, {name: value})
    assert load({}, {"FAIRGATE_TELEMETRY_OTLP": OURS}).telemetry.otlp == OURS
