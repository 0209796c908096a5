"""Prometheus registry of one gateway, and its exposition.

Labels come from closed sets, never tenants or keys: the number of series does not grow with customers.
"""

from __future__ import annotations

import platform
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from gateway.metrics.gen_ai import GenAIMetrics
from gateway.metrics.recent_lag import RecentLag
from gateway.metrics.requests import EndedRequests
from gateway.metrics.waits import RecentFirstTokens, RecentWaits
from gateway.trace_context import TRACEPARENT, TRACESTATE
from tenants.release import this_release

LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MAX_ACCEPT_CHARACTERS = 1_024
"""Of an Accept header; Prometheus sends some 200."""


class Metrics:
    """One registry per gateway: two gateways in one process (tests) do not collide."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self.refusals_by_code: dict[str, int] = {}
        build = Gauge(
            "fairgate_build_info",
            "1, of the version that runs.",
            ["version", "python"],
            registry=self.registry,
        )
        build.labels(this_release(), platform.python_version()).set(1)
        self.ended = EndedRequests()
        self.registry.register(self.ended)
        self.gen_ai = GenAIMetrics()
        self.registry.register(self.gen_ai)
        self.waits = RecentWaits()
        """By tenant, only for the status page."""
        self.first_tokens = RecentFirstTokens()
        self._refusals = Counter(
            "fairgate_refusals", "Requests refused, by error code.", ["code"], registry=self.registry
        )
        self._refusals.labels("queue_full")  # Prometheus sees no increase in a series that begins with one
        self._connections = Gauge("fairgate_connections", "Open connections.", registry=self.registry)
        self._connections_closed = Counter(
            "fairgate_connections_closed",
            "Connections without a request that were closed, by cause: idle, displaced by another one.",
            ["cause"],
            registry=self.registry,
        )
        self.event_loop_lag = Histogram(
            "fairgate_event_loop_lag_seconds",
            "How late the event loop wakes a timer, 50 times a second: meanwhile every request stands.",
            buckets=LAG_BUCKETS_S,
            registry=self.registry,
        )
        self.recent_lag = RecentLag()
        self._fallbacks = Counter(
            "fairgate_fallbacks",
            "Times that a model of an alias's chain was passed over, by reason.",
            ["alias", "model", "reason"],
            registry=self.registry,
        )
        self._traces_dropped = Counter(
            "fairgate_trace_headers_dropped",
            "Headers traceparent and tracestate that were dropped: no trace context, or too long.",
            ["header"],
            registry=self.registry,
        )
        for header in (TRACEPARENT, TRACESTATE):
            self._traces_dropped.labels(header)
        self._limit_events = Counter(
            "fairgate_limit_events",
            "Soft limits that reached a threshold (once per window and level), requests that a shadow limit "
            "would have refused, and counts of them that were dropped.",
            ["kind"],
            registry=self.registry,
        )

    def refused(self, code: str) -> None:
        """`code` is from the error table."""
        self._refusals.labels(code).inc()
        self.refusals_by_code[code] = self.refusals_by_code.get(code, 0) + 1

    def connections(self, number: int) -> None:
        self._connections.set(number)

    def connection_closed(self, cause: str) -> None:
        """`idle` or `displaced`."""
        self._connections_closed.labels(cause).inc()

    def passed_over(self, alias: str, model: str, reason: str) -> None:
        """The names are those of the settings."""
        self._fallbacks.labels(alias, model, reason).inc()

    def trace_dropped(self, header: str) -> None:
        self._traces_dropped.labels(header).inc()

    def limit_event(self, kind: str) -> None:
        """`threshold`, `would_deny` or `dropped`."""
        self._limit_events.labels(kind).inc()

    def render(self, accept: str, registry: Any = None) -> tuple[bytes, str]:
        """The exposition in the format that an Accept header asks for, and its content type. `registry`: what
        collects in place of this process's own."""
        try:
            encode, content_type = choose_encoder(accept[:MAX_ACCEPT_CHARACTERS])
        except ValueError:  # a version that is none
            encode, content_type = choose_encoder("")
        return encode(registry or self.registry), content_type
