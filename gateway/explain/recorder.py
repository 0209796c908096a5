"""Records a request for its timeline, its targets and its trace.

A failure here must not affect a request: it is logged and ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, QueueEntry
from engine.messages import TIER_RANKS, StepTime
from gateway.background import Site
from gateway.dispatch.admission import Admission
from gateway.dispatch.dispatcher import Dispatcher
from gateway.domain.call import Call
from gateway.domain.timeline import (
    Event,
    Timeline,
    TimelineKind,
    Whose,
    assemble,
    lags_s,
    pack,
    trace_numbers,
)
from gateway.domain.told import kept_figures
from gateway.domain.usage import Use
from gateway.explain.attribution import Metric, MissVerdict, RequestFacts
from gateway.explain.describer import Describer
from gateway.explain.fluid_share import FluidMachine, Job
from gateway.explain.ideal_share import FairTerms
from gateway.explain.kept_trace import kept_trace, missed
from gateway.explain.slo_monitor import PoolLoad, SloMonitor
from gateway.explain.timeline_writer import TimelineWriter
from gateway.flow.types import TokensAhead
from gateway.records.calibration_recorder import CalibrationRecorder
from gateway.requests.observer import RequestObserver
from gateway.requests.run import Run
from gateway.trace_context import RequestTrace
from gateway.tracing.build import KeptTrace
from gateway.tracing.decision import KeepCause
from gateway.tracing.tracer import Tracer
from tenants.outcomes import RequestOutcome
from tenants.types import Amounts, Tier

NOT_JUDGED = frozenset({RequestOutcome.SHUTDOWN})
"""The gateway stopped: that counts for no target."""

MAX_HELD = 4_096
"""Kept traces waiting for verdicts; further ones go without."""

log = logging.getLogger("fairgate.gateway.recorder")


class RequestRecorder(RequestObserver):
    """One model's requests. Use from one event loop."""

    def __init__(
        self,
        site: Site,
        pool: str,
        timelines: TimelineWriter,
        slo: SloMonitor,
        load: PoolLoad,
        find: Callable[[str], Run | None],
        admission: Admission,
        describer: Describer,
        calibration: CalibrationRecorder,
        tracer: Tracer | None,
    ) -> None:
        """`find`: a running request by id; `admission`: learns whether targets were met; `tracer` None: no
        traces."""
        self._calibration = calibration
        self._admission = admission
        self._describer = describer
        self._pool = pool
        self._meter, self._shared = load.meter, load.shared
        self._wall_clock = site.wall_clock
        self._tracer = tracer
        self._held: dict[str, KeptTrace] = {}
        self._timelines = timelines
        self._slo = slo
        self._find = find
        load.on_verdict = self._judged
        self._load = slo.pools[pool] = load

    def trace_of(self, call: Call) -> RequestTrace | None:
        if self._tracer is None:
            return super().trace_of(call)
        return self._tracer.rule.trace_of(call.request_id, call.trace)

    def in_line(self, run: Run, entry: QueueEntry, ahead: TokensAhead) -> None:
        """It holds its budget and could run from now on."""
        run.timeline.note(
            TimelineKind.QUEUED,
            entry.arrived_s,
            ahead.own,
            ahead.others,
            ahead.higher_tier,
            ahead.running,
        )
        binding = run.call.binding
        self._load.log.arrived(
            entry.entry_id,
            entry.tenant_id,
            entry.tier,
            entry.weight,
            entry.arrived_s,
            entry.input_tokens,
            entry.predicted_output_tokens,
            run.call.sequences,
            came_s=run.times.arrived_s,
            known_s=self._wall_clock() if binding is None else binding.quote.issued_s,
        )
        principal = run.call.principal
        tier = principal.reserved_tier
        terms = FairTerms(
            entry.weight, principal.reserved_tokens_per_s, None if tier is None else TIER_RANKS[tier]
        )
        self._meter.lined_up(
            entry.entry_id,
            entry.tenant_id,
            entry.tier,
            entry.predicted_cost,
            terms,
            entry.arrived_s,
            run.before_line_s,
        )
        if self._shared is not None:
            self._shared.arrived(entry, run.call.sequences, terms)

    def dispatched(self, run: Run) -> None:
        turn = run.turn
        assert turn is not None
        tier = TIER_RANKS[run.call.tier] if turn.tier is None else turn.tier
        displaced = sum(sequence.kv_tokens for sequence in turn.displaced)
        run.timeline.note(
            TimelineKind.DISPATCHED, turn.dispatched_s, tier, int(turn.by_reservation), displaced
        )
        self._load.log.dispatched(run.call.request_id, tier, turn.dispatched_s)
        if self._shared is not None:
            self._shared.dispatched(run.call.request_id, tier, turn.dispatched_s)

    def serving(self, now_s: float, replicas: int) -> None:
        self._load.log.serving(now_s, replicas)

    def kept_for(self, run: Run, outcome: RequestOutcome, use: Use) -> KeepCause | None:
        """None: not kept. Called before its settlement."""
        if self._tracer is None or run.trace is None:
            return None
        try:
            return self._tracer.decide(
                run.trace,
                outcome,
                run.outcomes,
                is_quote_kept=None if run.redemption is None else run.redemption.is_kept,
                has_missed=lambda: self._has_missed(run, outcome, use),
            )
        except Exception:
            log.exception("request %s: its trace is not kept", run.call.request_id)
            return None

    def _has_missed(self, run: Run, outcome: RequestOutcome, use: Use) -> bool:
        if not self._slo.book or not run.in_line or outcome in NOT_JUDGED:
            return False
        slos = self._slo.book.of(run.call.principal.tenant_id, Tier(run.call.tier))
        if not slos:
            return False
        facts = facts_of(run, outcome, use)
        return any(facts.misses(Metric(slo.metric), slo.target_s) for slo in slos)

    def ended(self, run: Run, outcome: RequestOutcome, use: Use, charged: Amounts) -> None:
        """`use`: what was computed and emitted."""
        try:
            ended_us = round(self._wall_clock() * 1e6)
            events = self.events(run, outcome, charged)
            if self._timelines.is_kept:
                self._keep(run, pack(events), ended_us)
            self._calibration.note(kept_figures(events, run.call.model, ended_us))
            unjudged = 0
            if run.in_line:
                facts = self._logged(run, outcome, use)
                if self._slo.book and outcome not in NOT_JUDGED:
                    unjudged = self._compare(run, outcome, facts)
            if self._tracer is not None and run.kept_for is not None:
                now_ns = round(self._wall_clock() * 1e9)
                kept = kept_trace(
                    run, run.kept_for, outcome, events, use, charged, now_ns=now_ns, unjudged=unjudged
                )
                self._trace(self._tracer, kept)
        except Exception:
            log.exception("request %s: what happened to it was not kept", run.call.request_id)

    def _keep(self, run: Run, packed: bytes, ended_us: int) -> None:
        call = run.call
        server = self._describer.server(run.times.ended_s or run.times.arrived_s)
        terms = self._describer.terms(run)
        ids = call.request_id, call.principal.tenant_id
        self._timelines.keep(*ids, packed, server, terms, ended_us=ended_us, session=call.session)

    def events(self, run: Run, outcome: RequestOutcome, charged: Amounts) -> list[Event]:
        call = run.call
        timeline = run.timeline
        own_tenant, own_tier = call.principal.tenant_id, TIER_RANKS[call.tier]

        def whose(sequence_ids: Sequence[str]) -> Whose:
            for sequence_id in sequence_ids:
                other = self._find(sequence_id.rpartition(".")[0])
                if other is not None:
                    if TIER_RANKS[other.call.tier] < own_tier:
                        return Whose.HIGHER_TIER
                    is_own = other.call.principal.tenant_id == own_tenant
                    return Whose.OWN if is_own else Whose.OTHER
            return Whose.UNKNOWN

        return assemble(
            _opened(run, timeline),
            run.times,
            run.outcomes,
            outcome,
            output_tokens=run.output_tokens,
            charged=(charged.input_tokens, charged.output_tokens, charged.cost_nanousd),
            whose=whose,
        )

    def _trace(self, tracer: Tracer, kept: KeptTrace) -> None:
        """Hands on what spans are made of, now or when the causes of its missed targets are known."""
        if kept.unjudged and len(self._held) < MAX_HELD:
            self._held[kept.trace.request_id] = kept
        else:
            tracer.keep(kept)

    def _judged(self, request_id: str, verdict: MissVerdict) -> None:
        kept = self._held.get(request_id)
        if kept is None or self._tracer is None:
            return
        kept.missed.append(missed(verdict))
        if len(kept.missed) == kept.unjudged:
            del self._held[request_id]
            self._tracer.keep(kept)

    def own_time_s(self, run: Run) -> tuple[float, float] | None:
        """Seconds of its tenant's later requests until its first token and its end; None: unknown by now."""
        times = run.times
        ended_s = times.arrived_s if times.ended_s is None else times.ended_s
        first_s = ended_s if times.first_token_s is None else times.first_token_s
        rested_s = run.timeline.waited_s(TimelineKind.TOPPED_UP, TimelineKind.STALLED)
        of_log, limited_s = partial(self._load.log.own_time_s, run.call.request_id), run.limited_s
        to_first_s = of_log(first_s, limited_s=limited_s, rested_s=0.0)
        to_end_s = of_log(ended_s, limited_s=limited_s, rested_s=rested_s)
        return None if to_first_s is None or to_end_s is None else (to_first_s, to_end_s)

    def _logged(self, run: Run, outcome: RequestOutcome, use: Use) -> RequestFacts:
        facts = facts_of(run, outcome, use)
        self._load.log.ended(
            run.call.request_id,
            facts.ended_s,
            facts.job.input_tokens,
            facts.job.cached_tokens,
            facts.job.output_tokens,
            is_complete=facts.is_complete,
        )
        inputs, outputs = use.served
        cost = inputs * INPUT_TOKEN_COST + outputs * OUTPUT_TOKEN_COST
        self._meter.ended(run.call.request_id, facts.ended_s, cost)
        if self._shared is not None:
            self._shared.ended(facts.job, facts.ended_s, cost, is_complete=facts.is_complete)
        return facts

    def _compare(self, run: Run, outcome: RequestOutcome, facts: RequestFacts) -> int:
        """Returns the number of misses to be judged."""
        if outcome is RequestOutcome.REFUSED:
            return 0  # refused on arrival: its client was answered immediately
        compared = self._slo.ended(self._pool, facts, Tier(run.call.tier))
        lag_s, ended_s = run.lag_s, facts.ended_s
        took_s = {metric.value: facts.actual_s(metric) for metric in (Metric.TTFT, Metric.E2E)}
        known_s = {metric: max(0.0, each - lag_s) for metric, each in took_s.items() if each is not None}
        self._admission.ended(run.call, known_s, ended_s)
        return compared.to_judge


def facts_of(run: Run, outcome: RequestOutcome, use: Use) -> RequestFacts:
    """A finished request, as far as targets need it. What it did not compute or emit counts as predicted."""
    call, times = run.call, run.times
    in_line_s = times.arrived_s if run.in_line_s is None else run.in_line_s
    is_whole = outcome in (RequestOutcome.COMPLETED, RequestOutcome.BUDGET)
    prompt = sum(len(prompt) for prompt in call.prompts) * call.choices
    predicted = run.predicted_output_tokens * call.sequences
    ended_s = times.arrived_s if times.ended_s is None else times.ended_s
    first_lag_s, last_lag_s = lags_s(run.timeline, times, run.outcomes)
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
        first_lag_s=first_lag_s,
        last_lag_s=last_lag_s,
    )


def machine_of(
    dispatcher: Dispatcher, replicas: Callable[[], int], step_time: Callable[[], StepTime]
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
                max(1, min(replica.max_sequences for replica in found)),
                max(1, min(replica.max_batched_tokens for replica in found)),
                max(1, min(replica.kv_tokens for replica in found)),
                max(replicas(), len(found)),
            )
        return last

    return look


def _opened(run: Run, timeline: Timeline) -> Timeline:
    call, estimate, arrived_s = run.call, run.estimate, run.times.arrived_s
    opened = Timeline()
    tier = TIER_RANKS[run.moves[0].before if run.moves else call.tier]
    size = (call.input_tokens, call.sequences, tier, call.max_tokens, _us(run.read_s))
    opened.note(TimelineKind.RECEIVED, arrived_s, *size)
    trace = run.trace
    if trace is not None and (trace.parent_id or run.kept_for is not None):
        opened.note(TimelineKind.TRACED, arrived_s, *trace_numbers(trace.trace_id, trace.parent_id or "0"))
    if estimate is not None:
        (wait_p50_s, wait_p90_s), (ttft_p50_s, ttft_p90_s) = estimate.wait_s, estimate.ttft_s
        (e2e_p50_s, e2e_p90_s), (tokens_p50, tokens_p90) = estimate.e2e_s, estimate.output_tokens
        quoted = (
            *(_us(wait_p50_s), _us(ttft_p50_s), _us(e2e_p50_s), tokens_p50),
            *(_us(wait_p90_s), _us(ttft_p90_s), _us(e2e_p90_s), tokens_p90),
        )
        opened.note(TimelineKind.QUOTED, arrived_s, *quoted, int(call.binding is not None))
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
    return round(seconds * 1e6) if seconds < 1e9 else 10**15
