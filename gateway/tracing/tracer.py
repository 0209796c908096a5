"""Decides at each settlement whether its trace is kept, and hands kept ones to the sending thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.messages import SequenceOutcome
from engine.telemetry.sender import SpanSender
from gateway.trace_context import SAMPLED, RequestTrace
from gateway.tracing.build import KeptTrace, RefusedTrace, refused_span, spans_of
from gateway.tracing.decision import KeepCause, TraceRule
from tenants.outcomes import RequestOutcome

NOT_KEPT = "not_kept"


class Tracer(Collector):
    """Use from one event loop."""

    def __init__(self, rule: TraceRule, sender: SpanSender) -> None:
        self.rule = rule
        self._sender = sender
        self._decided = {NOT_KEPT: 0} | {cause.value: 0 for cause in KeepCause}

    def decide(
        self,
        trace: RequestTrace,
        outcome: RequestOutcome,
        outcomes: Sequence[SequenceOutcome],
        *,
        is_quote_kept: bool | None,
        has_missed: Callable[[], bool],
    ) -> KeepCause | None:
        """Decides on the trace of an ended request, and counts it; see `TraceRule.cause_to_keep`."""
        cause = self.rule.cause_to_keep(
            trace, outcome, outcomes, is_quote_kept=is_quote_kept, has_missed=has_missed
        )
        self._decided[NOT_KEPT if cause is None else cause.value] += 1
        return cause

    def keep(self, kept: KeptTrace) -> None:
        """Makes and sends the spans of a kept trace, if there is room."""
        self._sender.offer(partial(spans_of, kept), is_sampled=kept.cause.is_sampled)

    def refuse(self, refused: RefusedTrace) -> None:
        """Keeps it only if its caller sampled it: a flood of refusals would push out what was served."""
        if refused.trace.parent_id and refused.trace.flags & SAMPLED:
            self._decided[KeepCause.PARENT_SAMPLED.value] += 1
            self._sender.offer(partial(refused_span, refused), is_sampled=True)

    def close(self) -> None:
        """Sends what waits, for a few seconds at most."""
        self._sender.close()

    def collect(self) -> Iterator[Metric]:
        decided = CounterMetricFamily(
            "fairgate_traces",
            "Traces of ended requests, by why they are kept; not_kept: no span was made.",
            labels=["decision"],
        )
        for decision, count in self._decided.items():
            decided.add_metric([decision], count)
        lost = CounterMetricFamily(
            "fairgate_traces_lost",
            "Kept traces that the collector does not have, by what was in the way.",
            labels=["reason"],
        )
        for reason, count in self._sender.lost.items():
            lost.add_metric([reason], count)
        yield from (decided, lost)
        yield CounterMetricFamily("fairgate_spans_built", "Spans that were made.", self._sender.built)
        yield CounterMetricFamily(
            "fairgate_spans_exported", "Spans that the collector has.", self._sender.exported
        )
        yield GaugeMetricFamily(
            "fairgate_traces_waiting", "Kept traces that wait to be sent.", self._sender.waiting
        )
