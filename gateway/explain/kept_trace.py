"""What is kept of an ended request for its spans: no prompt, no answer, no key. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.messages import TIER_RANKS
from engine.telemetry.spans import Attribute, Attributes
from gateway.domain.call import Call
from gateway.domain.timeline import Event
from gateway.domain.usage import Use
from gateway.explain.attribution import MissVerdict
from gateway.metrics import gen_ai
from gateway.requests.run import Run
from gateway.tracing.build import PREFIX, ClientCall, KeptTrace
from gateway.tracing.decision import ERRORS, KeepCause
from gateway.upstream.base import CountedOutcome
from gateway.upstream.http.target import target_of
from gateway.upstream.openai.upstream import OpenAIUpstream
from tenants.outcomes import RequestOutcome
from tenants.types import Amounts

_TIERS = {rank: tier for tier, rank in TIER_RANKS.items()}


def kept_trace(
    run: Run,
    cause: KeepCause,
    outcome: RequestOutcome,
    events: Sequence[Event],
    use: Use,
    charged: Amounts,
    *,
    now_ns: int,
    unjudged: int,
) -> KeptTrace:
    """`now_ns`: of the settlement, since 1970."""
    call, times = run.call, run.times
    assert run.trace is not None
    settled_s = times.ended_s if run.settled_s is None else run.settled_s
    took_s = 0.0 if settled_s is None else settled_s - times.arrived_s
    return KeptTrace(
        trace=run.trace,
        cause=cause,
        operation=gen_ai.operation_of(call),
        asked_model=call.model,
        model=call.pool or call.model,
        route=call.route,
        events=events,
        arrived_ns=now_ns - round(took_s * 1e9),
        settled_ns=now_ns,
        attributes=_attributes(run, outcome, use, charged),
        error=outcome.value if outcome in ERRORS else "",
        status=200 if run.has_begun or outcome in (RequestOutcome.COMPLETED, RequestOutcome.BUDGET) else None,
        clients=_clients(run, outcome),
        unjudged=unjudged,
    )


def missed(verdict: MissVerdict) -> Attributes:
    """Attributes have no null: what was not computed, or never reached, is left out."""
    found: dict[str, Attribute] = {
        "metric": verdict.metric.value,
        "cause": verdict.cause.value,
        "target_s": verdict.target_s,
    }
    if math.isfinite(verdict.actual_s):
        found["actual_s"] = verdict.actual_s
    return found | {name: value for name, value in verdict.evidence.items() if value is not None}


def _attributes(run: Run, outcome: RequestOutcome, use: Use, charged: Amounts) -> Attributes:
    call = run.call
    found: dict[str, Attribute] = {
        gen_ai.RESPONSE_ID: call.request_id,
        gen_ai.REQUEST_MAX_TOKENS: call.max_tokens,
        gen_ai.INPUT_TOKENS: charged.input_tokens,
        gen_ai.OUTPUT_TOKENS: charged.output_tokens,
        gen_ai.CACHED_TOKENS: use.cached_tokens,
        gen_ai.FINISH_REASONS: [use.outcome.finish for use in run.uses if use.outcome is not None],
        PREFIX + "tenant_id": call.principal.tenant_id,
        PREFIX + "project_id": call.principal.project_id,
        PREFIX + "key_id": call.principal.key_id,
        PREFIX + "tier.asked": (run.moves[0].before if run.moves else call.tier).value,
        PREFIX + "tier.used": _tier_used(run, call),
        PREFIX + "outcome": outcome.value,
        PREFIX + "stop_cause": run.stop_cause or "",
    }
    if run.redemption is not None and run.redemption.is_kept is not None:
        found[PREFIX + "quote.is_kept"] = run.redemption.is_kept
        found[PREFIX + "quote.missed"] = list(run.redemption.missed)
        found[PREFIX + "quote.credit_nanousd"] = run.redemption.credit_nanousd
    return found


def _tier_used(run: Run, call: Call) -> str:
    if run.turn is None or run.turn.tier is None:
        return call.tier.value
    return _TIERS[run.turn.tier]


def _clients(run: Run, outcome: RequestOutcome) -> list[ClientCall]:
    if run.turn is None or not isinstance(run.turn.upstream, OpenAIUpstream):
        return []
    first, times = run.turn.upstream, run.times
    by_name = {upstream.replica_id: upstream for upstream in (first, *first.stand_ins)}
    dispatched_s, ended_s = times.dispatched_s or times.arrived_s, times.ended_s or times.arrived_s
    found = []
    for index, use in enumerate(run.uses):
        at_s = ended_s
        if use.outcome is not None:
            at_s = min(ended_s, dispatched_s + use.outcome.finished_s)
        moved = use.outcome.replica_id if isinstance(use.outcome, CountedOutcome) else ""
        server = by_name.get(moved, first)
        address = target_of(server.address)
        found.append(
            ClientCall(
                index,
                str(server.describe()["server"] or "other"),
                address.host,
                address.port,
                server.replica_id,
                round((at_s - times.arrived_s) * 1e6),
                outcome.value if use.outcome is None and outcome in ERRORS else "",
            )
        )
    return found
