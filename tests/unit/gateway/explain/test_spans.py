"""Spans of finished requests against their timelines."""

from __future__ import annotations

import math

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace.propagation import tracecontext

from gateway.domain.timeline import Event, TimelineKind
from gateway.explain.attribution import Cause, Metric, MissVerdict
from gateway.explain.spans import EndedRequest, SpanEmitter, open_spans

CALLER = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


def test_a_span_is_a_child_of_the_callers_with_the_timeline_as_events() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    emitter = SpanEmitter(trace, tracecontext)
    emitter._tracer = provider.get_tracer("test")
    emitter.emit(
        EndedRequest(
            "req_1",
            [Event(TimelineKind.QUEUED, 1_000, (7, 0, 3)), Event(TimelineKind.ENDED, 2_000_000, (0,))],
            1_700_000_002_000_000_000,
            {"fairgate.tier": "standard"},
            CALLER,
            is_error=False,
            verdicts=[MissVerdict(Metric.TTFT, 0.5, math.inf, Cause.QUOTA, {"fair_s": 1.5, "alone_s": None})],
        )
    )
    (span,) = exporter.get_finished_spans()

    assert span.context.trace_id == 0x0123456789ABCDEF0123456789ABCDEF
    assert span.parent.span_id == 0x0123456789ABCDEF
    assert (span.start_time, span.end_time) == (1_700_000_000_000_000_000, 1_700_000_002_000_000_000)
    assert [each.name for each in span.events] == ["queued", "ended", "slo.missed"]
    assert span.events[0].timestamp == 1_700_000_000_001_000_000
    assert dict(span.events[0].attributes)["fairgate.own_tokens"] == 7
    assert dict(span.events[2].attributes) == {
        "fairgate.metric": "ttft",
        "fairgate.cause": "quota",
        "fairgate.target_s": 0.5,
        "fairgate.fair_s": 1.5,
    }


def test_without_a_configured_sdk_no_span_is_made() -> None:
    assert open_spans() is None
