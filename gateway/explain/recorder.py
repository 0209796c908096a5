"""Records a request for its timeline, its targets and its span.

Notified when a request is queued, dispatched and finished; builds the timeline (`gateway/domain/timeline.py`)
and the facts that targets are compared with (`attribution.py`). A failure here must not affect a request: it
is logged and left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from engine.entry import QueueEntry
from engine.messages import TIER_RANKS, StepTime
from gateway.dispatch.admission import Admission
from gateway.dispatch.dispatcher import Dispatcher
from gateway.domain.outcomes import RequestOutcome
from gateway.domain.timeline import Event, Timeline, TimelineKind, Whose, assemble, pack
from gateway.domain.usage import Use
from gateway.explain.attribution import FAULTS, MissVerdict, RequestFacts
from gateway.explain.describer import Describer
from gateway.explain.fluid_share import FluidMachine, Job
from gateway.explain.slo_monitor import PoolLoad, SloMonitor
from gateway.explain.spans import EndedRequest, SpanEmitter
from gateway.explain.timeline_writer import TimelineWriter
from gateway.flow.types import TokensAhead
from gateway.requests.run import Run
from tenants.types import Amounts, Tier

NOT_JUDGED = frozenset({RequestOutcome.SHUTDOWN})
"""The gateway stopped: that counts for no target."""

MAX_HELD = 4_096
"""Spans that wait for verdicts; further ones go without."""

log = logging.getLogger("fairgate.gateway.recorder")


class RequestRecorder:
    """The recorder of one model's requests. Use from one event loop."""

    def __init__(
        self,
        pool: str,
        timelines: TimelineWriter,
        slo: SloMonitor,
        find: Callable[[str], Run | None],
        machine: Callable[[], FluidMachine | None],
        *,
        admission: Admission,
        describer: Describer | None = None,
        wall_clock: Callable[[], float] = time.time,
        spans: SpanEmitter | None = None,
    ) -> None:
        """`find`: a running request by its id; `machine`: the engines as they are; `admission` is notified
        whether the requests that it admitted met their targets; `describer`: None: timelines do not say what
        served; `spans`: None: no spans are made."""
        self._admission = admission
        self._describer = describer
        self._pool = pool
        self._wall_clock = wall_clock
        self._spans = spans
        self._held: dict[str, EndedRequest] = {}
        """Spans that wait for a verdict, by request."""
        self._timelines = timelines
        self._slo = slo
        self._find = find
        self._load = slo.pools[pool] = PoolLoad(machine, on_verdict=self._judged)

    def in_line(self, run: Run, entry: QueueEntry, ahead: TokensAhead) -> None:
        """It holds its budget, and could run from now on."""
        run.timeline.note(
            TimelineKind.QUEUED,
            entry.arrived_s,
            ahead.own,
            ahead.others,
            ahead.higher_tier,
            ahead.running,
        )
        if self._slo.book:
            self._load.log.arrived(
                entry.entry_id,
                entry.tenant_id,
                entry.tier,
                entry.weight,
                entry.arrived_s,
                entry.input_tokens,
                entry.predicted_output_tokens,
                run.call.sequences,
            )

    def dispatched(self, run: Run) -> None:
        """It was dispatched."""
        turn = run.turn
        assert turn is not None
        tier = TIER_RANKS[run.call.tier] if turn.tier is None else turn.tier
        displaced = sum(each.kv_tokens for each in turn.displaced)
        run.timeline.note(
            TimelineKind.DISPATCHED, turn.dispatched_s, tier, int(turn.by_reservation), displaced
        )
        if self._slo.book:
            self._load.log.dispatched(run.call.request_id, tier)

    def serving(self, now_s: float, replicas: int) -> None:
        """The number of replicas that serve from now on."""
        self._load.log.serving(now_s, replicas)

    def ended(self, run: Run, outcome: RequestOutcome, use: Use, charged: Amounts) -> None:
        """It has ended. `use` is what was computed and emitted."""
        try:
            events: list[Event] = []
            if self._timelines.is_kept or self._spans is not None:
                events = self.events(run, outcome, charged)
            if self._timelines.is_kept:
                self._keep(run, pack(events))
            unjudged = 0
            if self._slo.book and run.in_line and outcome not in NOT_JUDGED:
                unjudged = self._compare(run, outcome, use)
            if self._spans is not None:
                self._tell(self._spans, run, outcome, events, unjudged)
        except Exception:
            log.exception("request %s: what happened to it was not kept", run.call.request_id)

    def _keep(self, run: Run, packed: bytes) -> None:
        request_id, tenant_id = run.call.request_id, run.call.principal.tenant_id
        if self._describer is None:
            self._timelines.keep(request_id, tenant_id, packed)
            return
        server = self._describer.server(run.times.ended_s or run.times.arrived_s)
        self._timelines.keep(request_id, tenant_id, packed, server, self._describer.terms(run))

    def events(self, run: Run, outcome: RequestOutcome, charged: Amounts) -> list[Event]:
        """Its timeline."""
        call = run.call
        timeline = run.timeline
        own_tenant, own_tier = call.principal.tenant_id, TIER_RANKS[call.tier]

        def whose(sequence_ids: Sequence[str]) -> Whose:
            """The first of them that runs here."""
            for each in sequence_ids:
                other = self._find(each.rpartition(".")[0])
                if other is not None:
                    if TIER_RANKS[other.call.tier] < own_tier:
                        return Whose.HIGHER_TIER
                    is_own = other.call.principal.tenant_id == own_tenant
                    return Whose.OWN if is_own else Whose.OTHER
            return Whose.UNKNOWN

        return assemble(
            _opened(run, timeline),
            run.times,
            [each.outcome for each in run.uses if each.outcome is not None],
            outcome,
            output_tokens=run.output_tokens,
            charged=(charged.input_tokens, charged.output_tokens, charged.cost_nanousd),
            whose=whose,
        )

    def _tell(
        self, spans: SpanEmitter, run: Run, outcome: RequestOutcome, events: list[Event], unjudged: int
    ) -> None:
        """Emits a span, now or when the causes of its missed targets are known."""
        call = run.call
        ended = EndedRequest(
            call.request_id,
            events,
            round(self._wall_clock() * 1e9),
            {
                "fairgate.tenant_id": call.principal.tenant_id,
                "fairgate.tier": call.tier.value,
                "fairgate.model": call.model,
                "fairgate.outcome": outcome.value,
            },
            call.trace_context,
            is_error=outcome in FAULTS,
            unjudged=unjudged,
        )
        if unjudged and len(self._held) < MAX_HELD:
            self._held[call.request_id] = ended
        else:
            spans.emit(ended)

    def _judged(self, request_id: str, verdict: MissVerdict) -> None:
        ended = self._held.get(request_id)
        if ended is None or self._spans is None:
            return
        ended.verdicts.append(verdict)
        if len(ended.verdicts) == ended.unjudged:
            del self._held[request_id]
            self._spans.emit(ended)

    def _compare(self, run: Run, outcome: RequestOutcome, use: Use) -> int:
        """Compares with the targets; returns the number of misses to be judged."""
        facts = facts_of(run, outcome, use)
        self._load.log.ended(
            run.call.request_id,
            facts.ended_s,
            facts.job.input_tokens,
            facts.job.cached_tokens,
            facts.job.output_tokens,
            is_complete=facts.is_complete,
        )
        if outcome is RequestOutcome.REFUSED:
            return 0  # refused on arrival: its client was answered immediately
        compared = self._slo.ended(self._pool, facts, Tier(run.call.tier))
        self._admission.ended(run.call, run.estimate, missed=compared.missed > 0)
        return compared.to_judge


def facts_of(run: Run, outcome: RequestOutcome, use: Use) -> RequestFacts:
    """A finished request, as far as targets need it. What it did not compute or emit counts as predicted."""
    call, times = run.call, run.times
    in_line_s = times.arrived_s if run.in_line_s is None else run.in_line_s
    is_whole = outcome in (RequestOutcome.COMPLETED, RequestOutcome.BUDGET)
    prompt = sum(len(each) for each in call.prompts) * call.choices
    predicted = run.predicted_output_tokens * call.sequences
    ended_s = times.arrived_s if times.ended_s is None else times.ended_s
    return RequestFacts(
        job=Job(
            job_id=call.request_id,
            tenant_id=call.principal.tenant_id,
            tier=TIER_RANKS[call.tier] if run.turn is None or run.turn.tier is None else run.turn.tier,
            weight=call.principal.weight,
            arrived_s=in_line_s,
            input_tokens=use.computed_tokens if is_whole else prompt,
            output_tokens=max(1, use.output_tokens if is_whole else max(use.output_tokens, predicted)),
            sequences=call.sequences,
            cached_tokens=max(0, prompt - use.computed_tokens) if is_whole else 0,
        ),
        arrived_s=times.arrived_s,
        outcome=outcome,
        first_token_s=times.first_token_s,
        last_token_s=times.last_token_s,
        ended_s=ended_s,
        limited_s=run.limited_s,
        store_s=max(0.0, in_line_s - times.arrived_s - run.limited_s),
        rested_s=run.timeline.waited_s(TimelineKind.TOPPED_UP),
        stalled_s=run.timeline.waited_s(TimelineKind.STALLED),
    )


def machine_of(
    dispatcher: Dispatcher, replicas: int, step_time: Callable[[], StepTime]
) -> Callable[[], FluidMachine | None]:
    """The engines of one model as they are, or as they last were; `replicas`: how many there should be;
    `step_time`: at their real pace, with the time between two steps."""
    last: FluidMachine | None = None

    def look() -> FluidMachine | None:
        nonlocal last
        found = dispatcher.replicas()
        if found:
            last = FluidMachine(
                step_time(),
                max(1, min(each.max_sequences for each in found)),
                max(1, min(each.max_batched_tokens for each in found)),
                max(1, min(each.kv_tokens for each in found)),
                max(replicas, len(found)),
            )
        return last

    return look


def _opened(run: Run, timeline: Timeline) -> Timeline:
    """With the estimate made on arrival."""
    call, estimate, arrived_s = run.call, run.estimate, run.times.arrived_s
    opened = Timeline()
    opened.note(
        TimelineKind.RECEIVED,
        arrived_s,
        call.input_tokens,
        call.sequences,
        TIER_RANKS[run.moves[0].before if run.moves else call.tier],
        call.max_tokens,
    )
    if estimate is not None:
        opened.note(
            TimelineKind.QUOTED,
            arrived_s,
            _us(estimate.wait_s[0]),
            _us(estimate.ttft_s[0]),
            _us(estimate.e2e_s[0]),
            estimate.output_tokens[0],
        )
    if run.in_line_s is not None:
        held = run.held
        opened.note(
            TimelineKind.RESERVED,
            run.in_line_s,
            _us(run.limited_s),
            held.input_tokens,
            held.output_tokens,
            int(call.may_be_cut),
        )
    for move in run.moves:
        opened.note(
            TimelineKind.MOVED, arrived_s + move.after_s, TIER_RANKS[move.before], TIER_RANKS[move.after]
        )
    opened.notes += timeline.notes
    return opened


def _us(seconds: float) -> int:
    return round(min(seconds, 1e9) * 1e6)
