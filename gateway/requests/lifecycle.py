"""The lifecycle of a request, from the key to the ledger.

This module owns the sequence:

     1 authenticate   `gateway/http/authentication.py`, before the body is read
     2 parse          `parse.py`: a `Call`
     3 quote          its probable wait, times and cost
     4 reserve        wait until its tenant's rate can feed it; hold what it probably needs on every limit,
                      and make that durable
     5 queue          behind the tenants that had less
     6 dispatch       when an engine has room
     7 decode         the engine's deltas; more is held before what is held runs out
     8 stream         handed to the response writer
     9 settle         charge what happened, exactly once, durable before the answer ends
    10 judge          forecasts learn, metrics count

A request runs in a task of its own that only the gateway's end can cancel. The HTTP side only listens; a
client that leaves, a budget that runs out, an engine that dies, a deadline that passes: each is one named
outcome of the same sequence, and `finish.py` settles every one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.entry import QueueEntry
from engine.messages import TIER_RANKS
from gateway.budget import lease
from gateway.budget.holds import BudgetDenied, Holds
from gateway.budget.metering import RequestMetering
from gateway.budget.stream_limiter import StreamLimiter, StreamLimitReached, fed_streams
from gateway.budget.top_up import AccountsLost, Leases, TopUpTask
from gateway.dispatch.admission import Admission, NotInTime
from gateway.dispatch.dispatcher import Closing, Dispatcher, NoEngineAvailable, QueueExpired, QueueRefused
from gateway.domain.call import Call
from gateway.domain.estimate import Times
from gateway.domain.ids import sequence_id
from gateway.domain.outcomes import RequestOutcome
from gateway.domain.targets import RequestTargets, targets_of
from gateway.domain.usage import SequenceUse
from gateway.estimates.estimator import Estimator
from gateway.flow.controller import QueueFull, Ticket
from gateway.flow.prefix_index import prefix_hashes
from gateway.metrics.registry import Metrics
from gateway.requests.execution import Execution, StoppedByEngine
from gateway.requests.finish import RequestFinisher
from gateway.requests.observer import RequestObserver
from gateway.requests.queue_progress import Outlook, outlook
from gateway.requests.run import Events, InLine, Interrupted, Run
from gateway.requests.tier_change import NotWaiting, Offer, TierChange
from gateway.statistics import RecentShare
from gateway.upstream.base import (
    SequenceRefused,
    Upstream,
    UpstreamFailed,
    UpstreamLost,
    UpstreamUnavailable,
)
from tenants.errors import DatabaseUnavailable, UnknownPrice
from tenants.pricing.pricing import PriceBook
from tenants.quota.store import QuotaStoreUnavailable
from tenants.types import OnLowBudget, Tier

RETRY_FEED_S = 1.0
"""`Retry-After` when too many requests wait for their tenant's rate."""

log = logging.getLogger("fairgate.gateway.lifecycle")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class LifecycleLimits:
    """Time limits of a request's waits, and how much is held ahead."""

    reserve_quantile: float
    """Of the predicted output, held before it runs."""
    outcome_wait_s: float
    settle_wait_s: float
    hold_wait_s: float
    accounts_wait_s: float
    slow_reader_s: float
    max_buffered_events: int
    max_fed_waiting: int
    feed_wait_s: Mapping[Tier, float]
    """For its tenant's rate, before it is queued."""
    quote_credit_share: float = 0.5
    """Of the charge, given back where a redeemed quote was not kept and that is ours."""


class Lifecycle:
    """Runs requests. Use from one event loop."""

    def __init__(
        self,
        *,
        holds: Holds,
        dispatcher: Dispatcher,
        estimates: Estimator,
        prices: Callable[[], PriceBook],
        metrics: Metrics,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        limits: LifecycleLimits,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        observer: RequestObserver | None = None,
        admission: Admission | None = None,
    ) -> None:
        """`clock` and `sleep` measure a request's times; `wall_clock` says which limits are in force."""
        self._holds = holds
        self._dispatcher = dispatcher
        self._estimates = estimates
        self._prices = prices
        self._clock = clock
        self._wall_clock = wall_clock
        self._limits = limits
        self._sleep = sleep
        self._observer = observer
        self.reserve_quantile = limits.reserve_quantile
        """Of the predicted output, held before a request runs."""
        self.admission = admission or Admission()
        self.prefix_hits = RecentShare()
        """Of prompt tokens, found in a cache."""
        self._stream_limiter = StreamLimiter(max_waiting=limits.max_fed_waiting)
        self._execution = Execution(
            dispatcher,
            self._top_up_task,
            clock,
            require_presence=holds.require_presence,
            outcome_wait_s=limits.outcome_wait_s,
            slow_reader_s=limits.slow_reader_s,
        )
        self._tier_change = TierChange(holds, dispatcher, clock, wall_clock)
        self._finisher = RequestFinisher(
            holds,
            dispatcher,
            self._stream_limiter,
            estimates,
            metrics,
            observer,
            clock,
            prefix_hits=self.prefix_hits,
            settle_wait_s=limits.settle_wait_s,
            quote_credit_share=limits.quote_credit_share,
        )
        self._tasks: dict[Run, asyncio.Task[None]] = {}
        self._by_id: dict[str, Run] = {}

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._tasks)

    def begin(self, call: Call) -> Run:
        """Starts a request; the listener reads `run.events` up to `Closed`."""
        uses = [SequenceUse(len(call.prompt_of(index))) for index in range(call.sequences)]
        events = Events(self._limits.max_buffered_events, is_whole=not call.stream)
        prices = self._prices() if call.binding is None else call.binding.prices
        run = Run(call, Times(self._clock()), uses, prices, events)
        if call.timeout_s is not None:
            run.expires_s = run.times.arrived_s + call.timeout_s
        task = asyncio.create_task(self._run(run), name=f"request {call.request_id}")
        self._tasks[run] = task
        self._by_id[call.request_id] = run
        task.add_done_callback(lambda _: self._forget(run))
        return run

    def find(self, request_id: str) -> Run | None:
        """A request of this gateway that has not ended."""
        return self._by_id.get(request_id)

    def runs_of(self, tenant_id: str) -> list[Run]:
        """A tenant's requests, the oldest first."""
        return [run for run in self._tasks if run.call.principal.tenant_id == tenant_id]

    def cancel(self, run: Run) -> None:
        """Ends a request that waits or runs; what was emitted is charged. Harmless to repeat."""
        run.interrupt(RequestOutcome.CANCELLED)

    def offer(self, run: Run, tier: Tier) -> Offer:
        """The prices before and after a move to `tier`. Raises `NotWaiting`, `UnknownPrice`."""
        if run.status != "waiting":
            raise NotWaiting(run.status)
        return self._tier_change.offer(run, tier)

    async def move(self, run: Run, tier: Tier, by: str) -> Offer:
        """Moves a waiting request to another tier. Raises as `TierChange.move`."""
        offer = await self._tier_change.move(run, tier, by, self._targets(run, tier))
        run.estimate = self._estimates.of_call(run.call, self._clock()) or run.estimate
        return offer

    def outlook(self, run: Run) -> Outlook:
        """The present outlook of a waiting request."""
        now_s = self._clock()
        expected = self._estimates.of_call(run.call, now_s) if run.in_line else None
        return outlook(run, expected, self._dispatcher.flow.tickets(), now_s)

    def _forget(self, run: Run) -> None:
        self._tasks.pop(run, None)
        self._by_id.pop(run.call.request_id, None)

    async def close(self, grace_s: float) -> None:
        """Lets running requests go on for `grace_s`, then interrupts and settles them."""
        self._dispatcher.refuse_waiting(Closing())
        if self._tasks and grace_s > 0:
            await asyncio.wait(list(self._tasks.values()), timeout=grace_s)
        for run in list(self._tasks):
            run.interrupt(RequestOutcome.SHUTDOWN)
        if self._tasks:
            wait_s = self._limits.outcome_wait_s + self._limits.settle_wait_s
            await asyncio.wait(list(self._tasks.values()), timeout=wait_s)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._execution.close()

    # ------------------------------------------------------------ the sequence

    async def _run(self, run: Run) -> None:
        outcome = RequestOutcome.FAILED
        cause: BaseException | None = None
        try:
            (
                run.predicted_output_tokens,
                run.predicted_high_tokens,
                run.predicted_tokens_to_hold,
            ) = self._estimates.predicted_lengths(run.call, (0.5, 0.9, self.reserve_quantile))
            run.estimate = (
                self._estimates.of_call(
                    run.call, run.times.arrived_s, (run.predicted_output_tokens, run.predicted_high_tokens)
                )
                if run.call.binding is None
                else run.call.binding.estimate
            )
            self.admission.check(run.call, run.estimate, run.times.arrived_s, self._expires_s(run))
            self._estimates.coming(
                run.call, run.times.arrived_s, (run.predicted_output_tokens, run.predicted_high_tokens)
            )
            await self._reserve(run)
            await self._wait_for_turn(run)
            outcome = await self._execution.decode(run)
        except BaseException as exception:
            outcome, cause = outcome_of(exception), exception
            if outcome is RequestOutcome.FAILED:
                log.error("request %s failed", run.call.request_id, exc_info=exception)
            if not isinstance(exception, Exception):
                raise
        finally:
            self._estimates.gone(run.call.request_id)
            await self._finisher.settle(run, outcome, cause)

    def _expires_s(self, run: Run) -> float:
        """When it leaves the queue: by its client's timeout or its tier's, whichever is earlier."""
        of_tier_s = run.times.arrived_s + self._limits.feed_wait_s[run.call.tier]
        return of_tier_s if run.expires_s is None else min(of_tier_s, run.expires_s)

    async def _reserve(self, run: Run) -> None:
        """4: holds what it probably needs, or nothing. Waiting for its tenant's rate it holds nothing."""
        call = run.call
        limits = call.principal.limits_for(call.tier, self._wall_clock())
        metering = RequestMetering(call, run.prices, run.uses)
        hold = lease.first_hold(
            limits,
            metering.size,
            lambda output_tokens: self._estimates.predicted_gpu_ms(call, output_tokens),
            call.sequences,
            run.predicted_tokens_to_hold * call.sequences,
            call.max_output_tokens,
            may_be_cut=not call.asked_max_tokens or call.principal.on_low_budget is OnLowBudget.TRUNCATE,
        )
        waits_since_s = self._clock()
        shares_rate = await self._wait_for_rate(
            run, fed_streams(limits, metering.size, self._estimates.stream_tokens_per_s())
        )
        run.limited_s = self._clock() - waits_since_s
        until_s = self._expires_s(run)
        while True:
            try:
                granted = await self._holds.reserve(
                    call, hold, price_version=run.prices.version, reported=lambda: metering.reported
                )
                break
            except BudgetDenied as refused:
                denied = refused.denied
                # A request that shares its tenant's rate is not refused because others just emptied it.
                if not shares_rate or not denied.limit.is_bucket or denied.retry_after_s is None:
                    raise
                if self._clock() + denied.retry_after_s > until_s:
                    raise
                self._estimates.gone(call.request_id)
                await _unless_interrupted(run, self._sleep(denied.retry_after_s))
                run.limited_s += denied.retry_after_s
        run.leases = Leases(limits, metering, call.max_tokens)
        run.leases.timeline = run.timeline
        run.leases.granted(granted.covered)
        run.limit_states = granted.states

    async def _wait_for_rate(self, run: Run, needs: dict[str, int]) -> bool:
        call = run.call
        try:
            passing = self._stream_limiter.enter(call.request_id, needs, call.sequences)
            if not passing.done():
                self._estimates.gone(call.request_id)  # it may be a while
            return await _unless_interrupted(run, passing, self._expires_s(run) - self._clock())
        except StreamLimitReached as full:
            raise QueueRefused(QueueFull(True, full.most, RETRY_FEED_S)) from None

    async def _wait_for_turn(self, run: Run) -> None:
        """5 and 6: queued, until it is dispatched or the client leaves."""
        call, ticket = run.call, self._ticket(run)
        self._estimates.arrived(ticket.entry)
        run.in_line, run.in_line_s = True, ticket.entry.arrived_s
        try:
            turn = self._dispatcher.line_up(ticket)
            if self._observer is not None:
                ahead = self._dispatcher.flow.tokens_ahead(call.request_id, self._clock())
                self._observer.in_line(run, ticket.entry, ahead)
            if call.wants_progress:
                run.events.put(InLine())
            run.turn = await _unless_interrupted(run, turn)
        finally:
            self._dispatcher.leave(call.request_id)
        run.times.dispatched_s = run.turn.dispatched_s
        if self._observer is not None:
            self._observer.dispatched(run)

    def _targets(self, run: Run, tier: Tier) -> RequestTargets:
        """Its targets in `tier`. A move to another tier gives its quote up."""
        call = run.call
        binding = None if run.moves or tier is not call.tier else call.binding
        return targets_of(
            self.admission.targets_s(call.principal.tenant_id, tier),
            None if binding is None else binding.estimate,
            since_s=run.times.arrived_s + run.limited_s,
            expires_s=run.expires_s,
            output_tokens=run.predicted_output_tokens,
        )

    def _ticket(self, run: Run) -> Ticket:
        call = run.call
        run.targets = self._targets(run, call.tier)
        computed = sum(len(prompt) for prompt in call.prompts) * call.choices
        entry = QueueEntry(
            entry_id=call.request_id,
            tenant_id=call.principal.tenant_id,
            # Queued since now: a request that took longer to reserve stands behind quicker ones.
            arrived_s=self._clock(),
            input_tokens=computed,
            predicted_output_tokens=run.predicted_output_tokens * call.sequences,
            tier=TIER_RANKS[call.tier],
            weight=call.principal.weight,
            predicted_high_tokens=run.predicted_high_tokens * call.sequences,
            deadline_s=run.targets.deadline_s,
            own_deadline_s=run.targets.own_deadline_s,
        )
        return Ticket(
            entry,
            call.sequences,
            computed + entry.predicted_output_tokens,
            max_tokens=call.max_tokens,
            is_exact=call.sampling.ignore_eos,
            # Without a timeout of its client the queue applies its tier's.
            expires_s=None if run.expires_s is None else self._expires_s(run),
            reserved_cost_per_s=call.principal.reserved_tokens_per_s,
            prefix_hashes=prefix_hashes(call.prompt_of(0), call.principal.tenant_id)
            if self._dispatcher.flow.wants_prefixes
            else (),
        )

    def _top_up_task(self, run: Run, upstream: Upstream) -> TopUpTask | None:
        """None: all that can come is covered."""
        call = run.call
        assert run.leases is not None
        if run.leases.is_whole:
            return None
        return TopUpTask(
            call.request_id,
            run.leases,
            upstream,
            self._holds,
            predict=lambda emitted: self._estimates.predicted_output_tokens(
                call, self.reserve_quantile, emitted
            ),
            sequence_ids=[sequence_id(call.request_id, index) for index in range(call.sequences)],
            clock=self._clock,
            sleep=self._sleep,
            hold_wait_s=self._limits.hold_wait_s,
            accounts_wait_s=self._limits.accounts_wait_s,
        )


async def _unless_interrupted(
    run: Run, waiting: Coroutine[Any, Any, Result] | Awaitable[Result], timeout_s: float | None = None
) -> Result:
    """The result of `waiting`. Raises `Interrupted` when the request was interrupted, `QueueExpired` when it
    takes longer than `timeout_s`."""
    task = asyncio.ensure_future(waiting)
    if task.done():
        return task.result()
    racing: set[asyncio.Future[Any]] = {task, run.interrupted}
    try:
        await asyncio.wait(racing, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    raise Interrupted(run.interrupted.result()) if run.interrupted.done() else QueueExpired


def outcome_of(cause: BaseException) -> RequestOutcome:
    """The named outcome of a request that `cause` ended."""
    match cause:
        case Interrupted(outcome=outcome):
            return outcome
        case asyncio.CancelledError() | Closing():
            return RequestOutcome.SHUTDOWN
        case AccountsLost():
            return RequestOutcome.ACCOUNTS_LOST
        case QueueExpired() | StoppedByEngine(finish="expired"):
            return RequestOutcome.EXPIRED
        case NoEngineAvailable() | UpstreamUnavailable():
            return RequestOutcome.NO_ENGINE
        case UpstreamFailed():
            return RequestOutcome.UPSTREAM_ERROR
        case StoppedByEngine(finish="cancelled") | UpstreamLost():
            # Cancelled without our asking: the engine gave this gateway up, which is as good as lost.
            return RequestOutcome.ENGINE_LOST
        case StoppedByEngine():
            return RequestOutcome.ENGINE_FAILED
        case (
            NotInTime() | BudgetDenied() | QueueRefused() | SequenceRefused() | QuotaStoreUnavailable()
            | DatabaseUnavailable() | UnknownPrice()
        ):  # fmt: skip
            return RequestOutcome.REFUSED
    return RequestOutcome.FAILED
