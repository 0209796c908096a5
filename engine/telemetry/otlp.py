"""Exports spans over OTLP/HTTP with OpenTelemetry's SDK: the extra `otel`.

Only imported where spans are exported. Headers, certificates, compression and timeout come from the standard
`OTEL_EXPORTER_OTLP_*` variables, further attributes of the process from `OTEL_RESOURCE_ATTRIBUTES`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from engine.telemetry.spans import SpanRecord

TIMEOUT_S = 5.0
"""Of one export with its retries, unless a variable sets it."""
TIMEOUT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
SCOPE = "fairgate"


class CollectorRefused(requests.RequestException):
    """The collector did not confirm that it has the spans."""


class OtlpExport:
    """One connection to a collector. Use from one thread."""

    def __init__(self, endpoint: str, resource: Mapping[str, str], timeout_s: float | None = None) -> None:
        """`endpoint`: the whole URL. `resource`: attributes of this process. `timeout_s`: goes before the
        variables."""
        self._resource = Resource.create({"service.version": _version()} | dict(resource))
        self._scope = InstrumentationScope(SCOPE, _version())
        self._said = ""
        session = requests.Session()
        session.hooks["response"] = [self._answered]
        has_timeout = any(os.environ.get(name) for name in TIMEOUT_VARIABLES)
        if timeout_s is None and not has_timeout:
            timeout_s = TIMEOUT_S
        self._exporter = OTLPSpanExporter(endpoint, session=session, timeout=timeout_s)
        # It logs every attempt; the caller says once what went wrong.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)

    def send(self, spans: Sequence[SpanRecord]) -> str:
        """Sends them; what went wrong, empty: the collector has them. Never raises."""
        self._said = "it cannot be reached"
        try:
            made = [self._made(span) for span in spans]
            if self._exporter.export(made) is SpanExportResult.SUCCESS:
                return ""
            return self._said
        except Exception as error:
            return f"the spans could not be encoded: {type(error).__name__}"

    def close(self) -> None:
        """Ends a wait for the next attempt, too."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _answered(self, answer: requests.Response, *_: Any, **__: Any) -> None:
        """Notes what a collector answers; a redirection is none, and is not followed."""
        self._said = f"it answers {answer.status_code}"
        if answer.is_redirect or 300 <= answer.status_code < 400:
            self._said += ", a redirection, which is not followed: name the collector itself"
            answer.close()
            raise CollectorRefused(self._said)

    def _made(self, span: SpanRecord) -> ReadableSpan:
        state = TraceState.from_header([span.state]) if span.state else None
        trace_id = int(span.trace_id, 16)
        own = _context(trace_id, span.span_id, is_remote=False, state=state)
        return ReadableSpan(
            span.name,
            own,
            _context(trace_id, span.parent_id, is_remote=span.is_parent_remote, state=state)
            if span.parent_id
            else None,
            self._resource,
            dict(span.attributes),
            [Event(event.name, dict(event.attributes), event.at_ns) for event in span.events],
            [
                Link(_context(int(link.trace_id, 16), link.span_id, is_remote=True), dict(link.attributes))
                for link in span.links
            ],
            SpanKind[span.kind.value],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start_ns,
            end_time=max(span.start_ns, span.end_ns),
            instrumentation_scope=self._scope,
        )


def _version() -> str:
    try:
        return metadata.version("fairgate")
    except metadata.PackageNotFoundError:  # run from a checkout that was not installed
        return "0+unknown"


def _context(trace_id: int, span_id: str, *, is_remote: bool, state: TraceState | None = None) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(trace_id, int(span_id, 16), is_remote, flags, state)
