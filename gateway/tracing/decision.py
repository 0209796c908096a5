"""Decides at a request's settlement, before any span is made, whether its trace is kept. Pure.

Kept are failed, displaced and caller-sampled requests, and a ratio of the rest by trace id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from engine.messages import SequenceOutcome
from gateway.domain.account import LOST_ITS_PLACE
from gateway.trace_context import SAMPLED, RequestTrace, TraceContext
from tenants.outcomes import RequestOutcome

ERRORS = frozenset(
    {
        RequestOutcome.ENGINE_LOST,
        RequestOutcome.ENGINE_FAILED,
        RequestOutcome.UPSTREAM_ERROR,
        RequestOutcome.ACCOUNTS_LOST,
        RequestOutcome.NO_ENGINE,
        RequestOutcome.EXPIRED,
        RequestOutcome.REFUSED,
        RequestOutcome.SLOW_READER,
        RequestOutcome.SHUTDOWN,
        RequestOutcome.FAILED,
    }
)
"""Ends without an answer that the client did not choose; one that its budget ended is an answer."""


class KeepCause(StrEnum):
    """Of several causes the first in this order."""

    ERROR = "error"
    QUOTE_BROKEN = "quote_broken"
    PREEMPTED = "preempted"
    SLO_MISSED = "slo_missed"
    PARENT_SAMPLED = "parent_sampled"
    RATIO = "ratio"

    @property
    def is_sampled(self) -> bool:
        return self in (KeepCause.PARENT_SAMPLED, KeepCause.RATIO)


@dataclass(frozen=True, slots=True)
class TraceRule:
    """The share of traces that is kept although nothing is wrong."""

    ratio: float

    def samples(self, trace_id: str) -> bool:
        """As OpenTelemetry's sampler by trace id: one ratio keeps the same traces everywhere."""
        return int(trace_id[16:], 16) < round(self.ratio * 2**64)

    def trace_of(self, request_id: str, caller: TraceContext | None) -> RequestTrace:
        trace = RequestTrace.of(request_id, caller)
        if caller is None and self.samples(trace.trace_id):
            return RequestTrace(trace.request_id, trace.trace_id, flags=trace.flags | SAMPLED)
        return trace

    def cause_to_keep(
        self,
        trace: RequestTrace,
        outcome: RequestOutcome,
        outcomes: Sequence[SequenceOutcome],
        *,
        is_quote_kept: bool | None,
        has_missed: Callable[[], bool],
    ) -> KeepCause | None:
        """None: not kept. `is_quote_kept`: None: no quote, or undecided; `has_missed`: whether it missed a
        target, called only if nothing else is wrong."""
        if outcome in ERRORS:
            return KeepCause.ERROR
        if is_quote_kept is False:
            return KeepCause.QUOTE_BROKEN
        if any(was_displaced(outcome) for outcome in outcomes):
            return KeepCause.PREEMPTED
        if has_missed():
            return KeepCause.SLO_MISSED
        if trace.parent_id and trace.flags & SAMPLED:
            return KeepCause.PARENT_SAMPLED
        return KeepCause.RATIO if self.samples(trace.trace_id) else None


def was_displaced(outcome: SequenceOutcome) -> bool:
    return outcome.preemptions > 0 or any(
        decision.others and decision.kind in LOST_ITS_PLACE for decision in outcome.decisions
    )
