"""Settings of traces, beside OpenTelemetry's own variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, field

from engine.bounds import Bounded
from engine.telemetry.sender import SpanTarget

PATH = "/v1/traces"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables: the first holds the whole URL, to the other the path is added."""
SAMPLER, SAMPLER_ARGUMENT = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
BY_RATIO = ("traceidratio", "parentbased_traceidratio")
RATIOS = {"always_on": 1.0, "parentbased_always_on": 1.0, "always_off": 0.0, "parentbased_always_off": 0.0}


class TelemetrySettings(Bounded, frozen=True, kw_only=True):
    """Where spans go, and how many."""

    otlp: Annotated[
        str,
        Meta(
            title="an http or https URL without credentials, such as http://127.0.0.1:4318, or nothing",
            pattern=r"(https?://[A-Za-z0-9.:\[\]_-]{1,255}(/[A-Za-z0-9._~/-]{0,255})?)?",
        ),
        "Collector that gets spans, by OTLP over HTTP; /v1/traces is added where the URL does not end with"
        " it. Needs the extra otel. Credentials go into OTEL_EXPORTER_OTLP_HEADERS. The default is what"
        " OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT says; without either no spans are"
        " made.",
    ] = ""
    trace_ratio: Annotated[
        float,
        Meta(ge=0, le=1, extra={"unit": "ratio"}),
        "Share of the traces that are kept although nothing is wrong with the request, by trace id; the"
        " default may come from OTEL_TRACES_SAMPLER. Always kept are errors, missed targets, broken quotes,"
        " requests that were displaced, and what a caller has sampled.",
    ] = 0.01
    spans_per_s: Annotated[
        int,
        Meta(ge=1, le=100_000),
        "Most spans that a gateway makes in a second, and an engine: each takes about 0.1 ms of a processor.",
    ] = 300
    max_waiting: Annotated[
        int,
        Meta(ge=2, le=1_000_000),
        "Kept traces that may wait to be sent; further ones are lost and counted. What is kept only for its"
        " caller or the ratio has half of it.",
    ] = field(default=1_000, name="waiting_traces")


class BadTelemetry(Exception):
    """Variables of OpenTelemetry that cannot be followed; the message names them."""


def span_target(settings: TelemetrySettings, environment: Mapping[str, str]) -> SpanTarget | None:
    """Where spans go; None: nowhere. Raises `BadTelemetry`."""
    endpoint = settings.otlp
    if not endpoint:
        if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return None
        if environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
            return None
        endpoint = next(filter(None, map(environment.get, ENDPOINTS)), "")
        if not endpoint:
            return None
        protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
            "OTEL_EXPORTER_OTLP_PROTOCOL"
        )
        if protocol not in (None, "", "http/protobuf"):
            raise BadTelemetry(
                f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}: spans go by http/protobuf only; set that, with"
                " the collector's port for it (usually 4318), or OTEL_TRACES_EXPORTER=none"
            )
        if "@" in endpoint or not endpoint.startswith(("http://", "https://")):
            raise BadTelemetry(
                f"{' or '.join(ENDPOINTS)} must be an http or https URL without credentials; these go into"
                " OTEL_EXPORTER_OTLP_HEADERS"
            )
    is_whole = not settings.otlp and bool(environment.get(ENDPOINTS[0]))
    if not is_whole and not endpoint.rstrip("/").endswith(PATH):
        endpoint = endpoint.rstrip("/") + PATH
    return SpanTarget(endpoint, settings.spans_per_s, settings.max_waiting)


def trace_ratio(settings: TelemetrySettings, environment: Mapping[str, str], *, is_given: bool) -> float:
    """The share of traces that is kept anyway. `is_given`: by our own setting, which goes first."""
    sampler = environment.get(SAMPLER, "")
    if is_given or not sampler:
        return settings.trace_ratio
    if sampler in RATIOS:
        return RATIOS[sampler]
    if sampler in BY_RATIO:
        try:
            ratio = float(environment.get(SAMPLER_ARGUMENT, "1"))
        except ValueError:
            ratio = -1.0
        if 0 <= ratio <= 1:
            return ratio
        raise BadTelemetry(f"{SAMPLER_ARGUMENT} must be a number from 0 to 1")
    raise BadTelemetry(f"{SAMPLER} must be one of {', '.join((*RATIOS, *BY_RATIO))}, not {sampler!r}")
