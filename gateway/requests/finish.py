"""Finish of a request: charge, settlement, notification, learning.

The last two steps of `lifecycle.py`, the same for every outcome. They cannot be cut short: a cancellation
ends the wait for the ledger, which is written all the same, and the listener always gets `Closed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from msgspec.structs import replace

from engine.messages import SequenceOutcome
from gateway.background import Site
from gateway.budget.holds import Holds
from gateway.budget.stream_limiter import StreamLimiter
from gateway.dispatch.dispatcher import Dispatcher
from gateway.domain.account import Account, decode_together, refills_of
from gateway.domain.fallback import Fallback
from gateway.domain.ids import sequence_id
from gateway.domain.quote_redemption import JUDGED, Redemption, redemption_of
from gateway.domain.timeline import TimelineKind
from gateway.domain.usage import Use, charge, use_of
from gateway.estimates.estimator import Estimator
from gateway.metrics.registry import Metrics
from gateway.requests.observer import RequestObserver
from gateway.requests.run import Closed, Run
from gateway.statistics import RecentShare
from gateway.upstream.base import ServersWord, servers_word
from tenants.outcomes import RequestOutcome
from tenants.pricing.pricing import counted
from tenants.types import NOTHING, Amounts

log = logging.getLogger("fairgate.gateway.lifecycle")


class SettlementPending(Exception):
    """The settlement is not durable yet."""


class SettlementFailed(Exception):
    """The settlement raised; the log has its trace."""


class RequestFinisher:
    """Settles requests. Use from one event loop."""

    def __init__(
        self,
        site: Site,
        holds: Holds,
        dispatcher: Dispatcher,
        estimates: Estimator,
        metrics: Metrics,
        stream_limiter: StreamLimiter,
        prefix_hits: RecentShare,
        observer: RequestObserver,
    ) -> None:
        self._holds = holds
        self._dispatcher = dispatcher
        self._stream_limiter = stream_limiter
        self._estimates = estimates
        self._metrics = metrics
        self._observer = observer
        self._clock = site.clock
        self._prefix_hits = prefix_hits
        self._settle_wait_s = site.config.settle_wait_s
        self._quote_credit_share = site.config.quote_credit_share
        self._most_credit_nanousd = round(site.config.quote_credit_usd * 1e9)
        """Of one tenant and day."""

    async def settle(self, run: Run, outcome: RequestOutcome, cause: BaseException | None) -> None:
        """Frees its place, settles durably, notifies. `cause`: why the answer is not complete."""
        await _acquire_for_good(run.accounts)  # a running tier change ends, and no other begins
        call = run.call
        run.times.ended_s = self._clock()
        taken_up = run.turn is not None and outcome not in (RequestOutcome.REFUSED, RequestOutcome.NO_ENGINE)
        use = use_of(run.uses, call.choices, dispatched=taken_up)
        outcomes = [each.outcome for each in run.uses if each.outcome is not None]
        said = servers_word(outcomes)
        charged, redemption, is_settled = NOTHING, None, False
        try:
            self._stream_limiter.leave(call.request_id)
            self._dispatcher.finish(call.request_id, *use.served)
            if call.request_id in self._holds.live:
                charged = self._charge(run, use)
                run.redemption = redemption = self._redemption(run, outcome, charged)
                # Before the acknowledgement, which also tells the engine whether to make spans.
                run.kept_for = self._observer.kept_for(run, outcome, use)
                credit = 0 if redemption is None else redemption.credit_nanousd
                pending, credited = await self._settle_holds(
                    run, outcome, charged, use, credit, outcomes, said
                )
                cause = pending or cause
                if redemption is not None and credited < credit:
                    run.redemption = redemption = redemption.capped_at(credited)
                run.settled_s = self._clock()
                is_settled = True
        except Exception:
            log.exception("request %s: its settlement failed", call.request_id)
            cause = SettlementFailed()
        if call.binding is not None and not charged.output_tokens and not charged.cost_nanousd:
            with contextlib.suppress(asyncio.CancelledError):
                await call.binding.release()
        account = _account(run, outcome, use, charged, redemption, outcomes, said)
        log.debug(
            "ended %s, charged %d input and %d output tokens",
            outcome.value,
            charged.input_tokens,
            charged.output_tokens,
        )
        if cause is not None:
            cause.__traceback__ = None  # its frames hold the request: a cycle until the next collection
        run.events.put(Closed(account, cause))
        if is_settled:
            # After the answer: what waits for this task resumes before.
            asyncio.get_running_loop().call_soon(self._learn, run, outcome, use, charged, redemption)

    def _charge(self, run: Run, use: Use) -> Amounts:
        call = run.call
        cost = run.prices.cost_nanousd(
            call.model, call.tier, use.input_tokens, use.cached_tokens, use.output_tokens
        )
        charged = charge(use, cost, run.held)
        if charged.output_tokens < use.output_tokens or charged.input_tokens < use.input_tokens:
            log.error("request %s used more than it held: %s of %s", call.request_id, use, run.held)
        return charged

    def _redemption(self, run: Run, outcome: RequestOutcome, charged: Amounts) -> Redemption | None:
        """The verdict on its quote; a move to another tier gives the quote up."""
        binding = run.call.binding
        if binding is None or run.moves:
            return None
        own_s = self._observer.own_time_s(run) if outcome in JUDGED else (0.0, 0.0)
        if own_s is None:
            return Redemption(binding.quote.offer_id, None, is_binding=binding.quote.is_binding)
        return redemption_of(
            binding.quote.offer_id,
            binding.estimate,
            run.times,
            outcome,
            output_tokens=charged.output_tokens,
            cost_nanousd=charged.cost_nanousd,
            limited_s=run.limited_s,
            rested_s=run.timeline.waited_s(TimelineKind.TOPPED_UP, TimelineKind.STALLED),
            credit_share=self._quote_credit_share,
            is_binding=binding.quote.is_binding,
            own_s=own_s,
        )

    @staticmethod
    def _counted(run: Run, charged: Amounts, use: Use) -> Amounts:
        if charged == NOTHING:
            return NOTHING
        call = run.call
        return counted(
            run.prices,
            call.model,
            call.tier,
            input_tokens=charged.input_tokens,
            cached_tokens=min(use.cached_tokens, charged.input_tokens),
            output_tokens=charged.output_tokens,
            requests=charged.requests,
            gpu_ms=charged.gpu_ms,
        )

    async def _settle_holds(
        self,
        run: Run,
        outcome: RequestOutcome,
        charged: Amounts,
        use: Use,
        credit_nanousd: int,
        outcomes: list[SequenceOutcome],
        said: ServersWord,
    ) -> tuple[SettlementPending | None, int]:
        """`SettlementPending` if it takes too long (it goes on), and the nano-dollars credited."""
        sequence_ids = [each.sequence_id for each in outcomes]
        upstream = run.turn.upstream if run.turn is not None else None

        def acknowledge() -> None:
            if upstream is not None and sequence_ids:
                upstream.acknowledge(sequence_ids, is_traced=run.kept_for is not None)
            for before in run.left_at:
                before.acknowledge(
                    [sequence_id(run.call.request_id, index) for index in range(len(run.uses))]
                )

        is_known = run.turn is None or len(outcomes) == len(run.uses) or not use.dispatched
        held = run.held
        detail = {
            "held": [held.input_tokens, held.output_tokens, held.cost_nanousd],
            "top_ups": run.leases.top_ups if run.leases is not None else 0,
            "stop_cause": run.stop_cause,
            "cached_tokens": use.cached_tokens,
            "reasoning_tokens": said.reasoning_tokens,
            "incomplete": said.incomplete,
            **({"closed": True} if said.closed else {}),
            "wait_s": run.times.wait_s,
            "ttft_s": run.times.ttft_s,
            "e2e_s": run.times.e2e_s,
            "finish": sorted({each.finish for each in outcomes}),
            "most_buffered_events": run.events.most_waiting,
            "engine_counted": len(outcomes),
            # Displacement either way, and the tokens paused: for operators.
            "displaced": [
                [decision.kind, decision.others, decision.displaced_tokens]
                for each in outcomes
                for decision in each.decisions
                if decision.displaced_tokens
            ],
            # Tenants that had the turns which it sat out, by id: for operators.
            "sat_out_for": decode_together(each.decode for each in outcomes).sat_out_for,
            # Without the engine's final count, what reached us counts; it may have emitted up to its lease.
            "basis": said.basis if is_known else "gateway",
            "upstream": _served_by(run, said),
            **(
                {"replica_moves": [move.as_json() for move in run.replica_moves]} if run.replica_moves else {}
            ),
            "uncertain_tokens": said.uncertain_tokens
            if is_known
            else max(0, held.output_tokens - use.output_tokens),
        }
        settlement = self._holds.settle(
            run.call,
            charged,
            outcome,
            detail,
            acknowledge,
            counted=self._counted(run, charged, use),
            credit_nanousd=credit_nanousd,
            most_credit_nanousd=self._most_credit_nanousd,
        )
        try:
            is_durable = await settlement.within(self._settle_wait_s)
        except asyncio.CancelledError:
            is_durable = False
        return None if is_durable else SettlementPending(), settlement.credited_nanousd

    def _learn(
        self,
        run: Run,
        outcome: RequestOutcome,
        use: Use,
        charged: Amounts,
        redemption: Redemption | None,
    ) -> None:
        """10: nothing here can hurt the request any more."""
        try:
            if use.input_tokens:
                self._prefix_hits.note(use.cached_tokens / use.input_tokens)
            self._judge(run, outcome, charged, redemption)
            self._observer.ended(run, outcome, use, charged)
        except Exception:
            log.exception("request %s: nothing was learned from it", run.call.request_id)

    def _judge(
        self, run: Run, outcome: RequestOutcome, charged: Amounts, redemption: Redemption | None
    ) -> None:
        call, ended_s = run.call, run.times.ended_s
        tier = call.tier.value
        assert ended_s is not None
        if outcome in (RequestOutcome.COMPLETED, RequestOutcome.BUDGET):
            for each in run.uses:
                if each.outcome is not None and each.outcome.finish != "budget":
                    self._estimates.learn(call, each.output_tokens, ended_s)
        # After a change of tier the estimate was a later one, of the remaining wait.
        if not run.moves and (wait_s := run.times.wait_s) is not None:
            told_s = None if run.estimate is None else run.estimate.wait_s
            self._metrics.waits.note(call.principal.tenant_id, tier, told_s, wait_s)
        if run.estimate is not None and not run.moves:
            if outcome is RequestOutcome.COMPLETED:
                # Learned as it is judged: without the time that its tenant's own later work took.
                times = run.times if redemption is None else run.times.without(*redemption.own_s)
                told = times.sooner(run.lag_s)
                self._estimates.judge(run.estimate, told, charged.output_tokens, run.waiting)
            elif run.in_line:
                self._estimates.judge(run.estimate, run.times, None, run.waiting)
        if run.times.ttft_s is not None:
            self._metrics.first_tokens.note(run.times.ttft_s, ended_s)
        self._metrics.ended.add(
            outcome.value,
            tier,
            run.times,
            charged.input_tokens,
            charged.output_tokens,
            charged.cost_nanousd,
        )
        exemplar = None if run.kept_for is None or run.trace is None else {"trace_id": run.trace.trace_id}
        self._metrics.gen_ai.ended(call, outcome, run.times, charged.output_tokens, exemplar)
        if run.in_line:
            self._metrics.ended.lined_up(tier, run.before_line_s)
        for each in run.uses:
            if each.outcome is not None:
                self._metrics.ended.decoded(tier, each.outcome.decode)


async def _acquire_for_good(lock: asyncio.Lock) -> None:
    """Acquires the lock even when cancelled meanwhile."""
    while True:
        try:
            await lock.acquire()
            return
        except asyncio.CancelledError:
            continue


def _account(
    run: Run,
    outcome: RequestOutcome,
    use: Use,
    charged: Amounts,
    redemption: Redemption | None,
    outcomes: list[SequenceOutcome],
    said: ServersWord,
) -> Account:
    call = run.call
    is_known = run.turn is None or len(outcomes) == len(run.uses)
    basis = said.basis if is_known else "gateway"
    return Account(
        request_id=call.request_id,
        tenant=call.principal.tenant_name,
        tier=call.tier.value,
        outcome=outcome.value,
        stop_cause=run.stop_cause,
        estimate=run.estimate,
        times=run.times,
        held=run.held,
        top_ups=run.leases.top_ups if run.leases is not None else 0,
        charged=charged,
        cached_tokens=use.cached_tokens,
        reasoning_tokens=said.reasoning_tokens,
        incomplete=said.incomplete,
        closed=said.closed,
        not_enforced=call.not_enforced,
        unknown_finish=said.unknown_finish,
        preemptions=sum(each.preemptions for each in outcomes),
        upstream=_served_by(run, said),
        basis=basis,
        decode=decode_together(each.decode for each in outcomes) if outcomes and basis == "engine" else None,
        decisions=[decision for each in outcomes for decision in each.decisions],
        moves=run.moves,
        replica_moves=run.replica_moves,
        redemption=redemption,
        fallback=_fallback(run),
        refills=refills_of(run.limit_states),
    )


def _served_by(run: Run, said: ServersWord) -> str | None:
    """The replica that ran it: it may have been moved from where it was sent."""
    return said.replica_id or (run.turn.upstream.replica_id if run.turn is not None else None)


def _fallback(run: Run) -> Fallback | None:
    call = run.call
    if call.chained is None:
        return None
    entry = run.prices.entries.get((call.model, call.tier))
    if call.chained.fallback.taken is None or entry is None:
        return call.chained.fallback
    return replace(call.chained.fallback, price_picousd=entry.token_picousd)
