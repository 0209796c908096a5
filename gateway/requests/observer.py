"""Hook of the request lifecycle: called as a request is queued, dispatched and finished."""

from __future__ import annotations

from engine.entry import QueueEntry
from gateway.domain.call import Call
from gateway.domain.usage import Use
from gateway.flow.types import TokensAhead
from gateway.requests.run import Run
from gateway.trace_context import RequestTrace
from gateway.tracing.decision import KeepCause
from tenants.outcomes import RequestOutcome
from tenants.types import Amounts


class RequestObserver:
    """Sees nothing. A subclass is called from the event loop of the request, and must not raise."""

    def trace_of(self, call: Call) -> RequestTrace | None:
        """None: it belongs to no trace."""
        return None if call.trace is None else RequestTrace.of(call.request_id, call.trace)

    def in_line(self, run: Run, entry: QueueEntry, ahead: TokensAhead) -> None:
        """The request holds its budget and is queued or already dispatched; `ahead`: by the queue's count."""

    def dispatched(self, run: Run) -> None:
        """To the upstream in `run.turn`."""

    def own_time_s(self, run: Run) -> tuple[float, float] | None:
        """What its tenant's own later requests took of its time to the first token and end; None: unknown."""
        return 0.0, 0.0

    def kept_for(self, run: Run, outcome: RequestOutcome, use: Use) -> KeepCause | None:
        """Why the trace of an ended request is kept; None: it is not. Asked before its settlement."""
        return None

    def ended(self, run: Run, outcome: RequestOutcome, use: Use, charged: Amounts) -> None:
        """The request is settled. `use`: what was computed and emitted."""
