"""OpenTelemetry spans of finished requests.

One span from a request's arrival to its end, a child of the caller's own (W3C `traceparent`), with its
timeline and its missed targets as span events. It is made after the request has ended, of what was recorded
anyway. Needs the extra `otel`; where no SDK was configured when the gateway starts (`opentelemetry-instrument
fairgate serve` does it from its own variables) none is made. Which traces are kept is the SDK's decision.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.domain.timeline import Event
from gateway.explain.attribution import MissVerdict

TRACER = "fairgate.gateway"
Attribute = str | int | float | bool


@dataclass(slots=True)
class EndedRequest:
    """The content of a finished request's span."""

    request_id: str
    events: Sequence[Event]
    ended_ns: int
    """Nanoseconds since 1970; the events' times lie before that."""
    attributes: Mapping[str, Attribute]
    traceparent: str | None
    is_error: bool
    unjudged: int = 0
    """Missed targets whose causes are still to come; the span waits for them."""
    verdicts: list[MissVerdict] = field(default_factory=list)


def open_spans() -> SpanEmitter | None:
    """The emitter; None where OpenTelemetry is not installed, or no SDK is configured."""
    try:
        trace = importlib.import_module("opentelemetry.trace")
        tracecontext = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
    except ModuleNotFoundError:
        return None
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    return SpanEmitter(trace, tracecontext)


class SpanEmitter:
    """Emits spans through OpenTelemetry's global tracer provider."""

    def __init__(self, trace: Any, tracecontext: Any) -> None:
        self._trace = trace
        self._propagator = tracecontext.TraceContextTextMapPropagator()
        self._tracer = trace.get_tracer(TRACER)

    def emit(self, ended: EndedRequest) -> None:
        """Emits one span; each missed target is an event at its end, with its cause and evidence."""
        last_us = max((each.at_us for each in ended.events), default=0)
        began_ns = ended.ended_ns - last_us * 1000
        carrier = {"traceparent": ended.traceparent}
        context = self._propagator.extract(carrier) if ended.traceparent else None
        span = self._tracer.start_span(
            "request",
            context=context,
            kind=self._trace.SpanKind.SERVER,
            start_time=began_ns,
            attributes={"fairgate.request_id": ended.request_id, **ended.attributes},
        )
        if span.is_recording():
            for each in ended.events:
                shown = each.as_json()
                numbers = {
                    f"fairgate.{name}": value
                    for name, value in shown.items()
                    if name not in ("event", "at_s")
                }
                span.add_event(str(shown["event"]), numbers, timestamp=began_ns + each.at_us * 1000)
            for verdict in ended.verdicts:
                missed = {f"fairgate.{name}": value for name, value in _missed(verdict).items()}
                span.add_event("slo.missed", missed, timestamp=ended.ended_ns)
            if ended.is_error:
                span.set_status(self._trace.StatusCode.ERROR)
        span.end(end_time=ended.ended_ns)


def _missed(verdict: MissVerdict) -> dict[str, Attribute]:
    """Attributes have no null: what was not computed, or never reached, is left out."""
    numbers = {name: value for name, value in verdict.evidence.items() if value is not None}
    if math.isfinite(verdict.actual_s):
        numbers["actual_s"] = verdict.actual_s
    return {
        "metric": verdict.metric.value,
        "cause": verdict.cause.value,
        "target_s": verdict.target_s,
        **numbers,
    }
