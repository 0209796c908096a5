"""The lifecycle of a request, from the key to the ledger.

     1 authenticate   `gateway/http/authentication.py`, before the body is read
     2 parse          `parse.py`: a `Call`
     3 quote          its probable wait, times and cost
     4 reserve        wait until its tenant's rate can feed it; durably hold what it probably needs
     5 queue          behind the tenants that had less
     6 dispatch       when an engine has room
     7 decode         the engine's deltas; more is held before what is held runs out
     8 stream         handed to the response writer
     9 settle         charge what happened, exactly once, durable before the answer ends
    10 judge          forecasts learn, metrics count

Of a chain of models, 2 to 4 are tried in one pool after the other (`gateway/pools/chain_walk.py`), and the
lifecycle of the pool that takes it goes on. A request runs in a task of its own that only the gateway's end
can cancel; the HTTP side only listens. A client that leaves, a spent budget, a dead engine, a passed
deadline: each is a named outcome of the same sequence, and `finish.py` settles every one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace as with_fields
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from engine.entry import QueueEntry
from engine.messages import TIER_RANKS
from gateway import errors, log_context
from gateway.background import Site
from gateway.budget import lease
from gateway.budget.holds import BudgetDenied, EndUserRefused, Holds
from gateway.budget.metering import RequestMetering
from gateway.budget.stream_limiter import StreamLimiter, StreamLimitReached, fed_streams
from gateway.budget.top_up import AccountsLost, Leases, TopUpTask
from gateway.dispatch.admission import (
    Admission,
    DeadlineUnreachable,
    EstimateExceeds,
    NotInTime,
    require_bounds,
)
from gateway.dispatch.dispatcher import Closing, Dispatcher, NoEngineAvailable, QueueExpired, QueueRefused
from gateway.dispatch.failing_tenants import FailingTenants, TenantHeldOff
from gateway.domain.call import Call
from gateway.domain.estimate import Times
from gateway.domain.fallback import NoneTook
from gateway.domain.ids import sequence_id
from gateway.domain.targets import RequestTargets, targets_of
from gateway.errors import ApiError
from gateway.estimates.displacement import Displacement
from gateway.estimates.estimator import Estimator
from gateway.fair_threads import TooManyWaiting
from gateway.flow.controller import QueueFull, Ticket
from gateway.metrics.registry import Metrics
from gateway.requests.execution import Execution, StoppedByEngine
from gateway.requests.finish import RequestFinisher
from gateway.requests.observer import RequestObserver
from gateway.requests.queue_progress import Outlook, outlook, told_in_s
from gateway.requests.relocation import Relocation
from gateway.requests.run import Events, InLine, Interrupted, Run, uses_of
from gateway.requests.tier_change import Offer, TierChange
from gateway.statistics import RecentShare
from gateway.upstream.base import (
    RequestTask,
    SequenceRefused,
    Upstream,
    UpstreamFailed,
    UpstreamLost,
    UpstreamUnavailable,
)
from tenants.errors import DatabaseUnavailable, KeyRejected, UnknownPrice
from tenants.outcomes import RequestOutcome
from tenants.pricing.pricing import counted
from tenants.quota.rules import refusal_by
from tenants.quota.store import Denied, Hold, QuotaStoreUnavailable
from tenants.types import Limit, Principal, RequestTraits, Tier

RETRY_FEED_S = 1.0
"""`Retry-After` when too many requests wait for their tenant's rate."""

log = logging.getLogger("fairgate.gateway.lifecycle")
Result = TypeVar("Result")


class PrincipalStandings(Protocol):
    """What has become of principals since they were authenticated (`tenants/directory/directory.py`)."""

    def standing(self, key_id: str, now_s: float) -> Principal:
        """As it is now. Raises `KeyRejected`."""
        ...

    def ends_running(self, key_id: str) -> bool:
        """Whether what runs with a refused key is to end as well."""
        ...


class Lifecycle:
    """Runs requests. Use from one event loop."""

    def __init__(
        self,
        site: Site,
        holds: Holds,
        dispatcher: Dispatcher,
        estimates: Estimator,
        metrics: Metrics,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        observer: RequestObserver | None = None,
        admission: Admission | None = None,
        elsewhere: Callable[[Call], Lifecycle] | None = None,
        standings: PrincipalStandings | None = None,
    ) -> None:
        """The site's `clock` and `sleep` measure a request's times, its `wall_clock` says which limits are in
        force; `elsewhere` finds another pool's lifecycle, for chains; `standings` knows principals now (None:
        as they came)."""
        self._holds = holds
        self._dispatcher = dispatcher
        self._estimates = estimates
        self._clock = site.clock
        self._wall_clock = site.wall_clock
        self._config = config = site.config
        self._queue_ttl_s = config.queue_ttl_s
        self._sleep = sleep
        self._observer = observer or RequestObserver()
        self._elsewhere = elsewhere
        self._standings = standings
        self.reserve_quantile = config.reserve_quantile
        """Of the predicted output, held before it runs."""
        self.admission = admission or Admission()
        self.failing = FailingTenants()
        self.prefix_hits = RecentShare()
        """Of prompt tokens, found in a cache."""
        self._stream_limiter = StreamLimiter(max_waiting=config.max_queued_per_tenant)
        self._relocation = Relocation(site, holds, dispatcher)
        self._execution = Execution(site, holds, dispatcher, self._relocation, self._top_up_task)
        self._tier_change = TierChange(site, holds, dispatcher)
        self._finisher = RequestFinisher(
            site,
            holds,
            dispatcher,
            estimates,
            metrics,
            self._stream_limiter,
            self.prefix_hits,
            self._observer,
        )
        self._tasks: dict[Run, asyncio.Task[None]] = {}
        self._by_id: dict[str, Run] = {}

    @property
    def running(self) -> int:
        return len(self._tasks)

    def begin(self, call: Call) -> Run:
        """Starts a request; the listener reads `run.events` up to `Closed`."""
        events = Events(
            self._config.max_buffered_events,
            most_bytes=self._config.max_buffered_bytes,
            is_whole=not call.stream,
        )
        bound = call.binding or call.chained
        prices = self._estimates.prices() if bound is None else bound.prices
        run = Run(call, Times(self._clock()), uses_of(call), prices, events)
        run.trace = self._observer.trace_of(call)
        if run.trace is not None and (context := log_context.CURRENT.get()) is not None:
            context.trace_id = run.trace.trace_id
        if call.timeout_s is not None:
            run.expires_s = run.times.arrived_s + call.timeout_s
        self._keep(run, asyncio.create_task(self._run(run), name=f"request {call.request_id}"))
        return run

    async def budget_check(
        self, principal: Principal, model: str, tier: Tier, end_user: str, least_output: int = 1
    ) -> Callable[[int], None]:
        """A function that raises `BudgetDenied` where the reservation would refuse a prompt of at least so
        many tokens, by the limits' states of now; raised at once where any prompt would be refused.
        `least_output`: tokens of its answer. Nothing is held."""
        limits = principal.limits_for(RequestTraits(tier, model, 1, end_user), self._wall_clock())
        states = await self._holds.look(limits)
        prices, shares_rate = self._estimates.prices(), self._stream_limiter.feeds(limits)

        def require(prompt_tokens: int) -> None:
            least = counted(prices, model, tier, input_tokens=prompt_tokens, output_tokens=least_output)
            denied = refusal_by(states, Hold(least, least, least, may_be_cut=True))
            if denied is None or (
                shares_rate and denied.limit.is_bucket and denied.retry_after_s is not None
            ):
                return  # as `_reserve`: a rate that is shared is waited for
            raise BudgetDenied(denied)

        require(1)
        return require

    def find(self, request_id: str) -> Run | None:
        return self._by_id.get(request_id)

    def runs_of(self, tenant_id: str | None) -> list[Run]:
        """A tenant's requests, or with None all, the oldest first."""
        return [run for run in self._tasks if tenant_id in (None, run.call.principal.tenant_id)]

    def cancel(self, run: Run) -> None:
        """Ends a request that waits or runs; what was emitted is charged. Harmless to repeat."""
        run.interrupt(RequestOutcome.CANCELLED)

    def move_off(self, upstream: Upstream) -> None:
        """Moves what runs at a replica to others; harmless to repeat."""
        for run in self._tasks:
            if run.turn is not None and run.turn.upstream is upstream and run.times.ended_s is None:
                self._relocation.drain(run)

    def is_long(self, run: Run) -> bool:
        tokens = run.call.input_tokens * run.call.choices + run.predicted_output_tokens * run.call.sequences
        return tokens > self._dispatcher.flow.queue.lane_rule.long_tokens

    def offer(self, run: Run, tier: Tier) -> Offer:
        """The prices before and after a move to `tier`. Raises `ApiError`, `UnknownPrice`."""
        if run.status != "waiting":
            raise errors.not_waiting(status=run.status)
        return self._tier_change.offer(run, tier)

    def displacement(self, run: Run, tier: Tier) -> Displacement:
        call = run.call
        tokens = run.predicted_output_tokens * call.sequences
        return self._estimates.displacement(call.principal.tenant_id, tier, call.sequences, tokens)

    async def move(self, run: Run, tier: Tier, by: str) -> Offer:
        """Moves a waiting request to another tier. Raises as `TierChange.move`."""
        offer = await self._tier_change.move(run, tier, by, self._targets(run, tier))
        run.estimate = self._estimates.of_call(run.call, self._clock()) or run.estimate
        return offer

    def outlook(self, run: Run, tier: Tier | None = None) -> Outlook:
        """`tier`: as if it were moved there."""
        now_s = self._clock()
        call = run.call if tier is None else replace(run.call, tier=tier)
        expected = self._estimates.of_call(call, now_s) if run.in_line else None
        return outlook(run, expected, self._dispatcher.flow.queue.tickets(), now_s, tier)

    async def follow_directory(self) -> None:
        """Applies changed keys and limits: a refused key's requests end (running ones only where told), and
        the rest hold on the limits in force. Raises `QuotaStoreUnavailable`, `DatabaseUnavailable`."""
        failed: Exception | None = None
        # First all that ends, which waits for no store and no other request.
        admitted = [(run, task) for run, task in list(self._tasks.items()) if self._still_admitted(run)]
        for run, task in admitted:
            try:
                if run.turn is not None and self._still_admitted(run):
                    await self._under_limits_in_force(run, task)
            except EndUserRefused as refused:
                log.warning("request %s runs on without a limit: %s", run.call.request_id, refused)
            except (QuotaStoreUnavailable, DatabaseUnavailable) as error:
                failed = error
        if failed is not None:
            raise failed

    def _still_admitted(self, run: Run) -> bool:
        """Interrupts a request whose key is refused now; one that runs only where it is to end as well."""
        return self._standings is None or self._standing(run, self._standings) is not None

    def _standing(self, run: Run, standings: PrincipalStandings) -> Principal | None:
        """Its principal as it is now; None: its key is refused, see `_still_admitted`."""
        key_id = run.call.principal.key_id
        try:
            return standings.standing(key_id, self._wall_clock())
        except KeyRejected as refused:
            if run.turn is None or standings.ends_running(key_id):
                run.withdrawn_because = refused.reason
                run.interrupt(RequestOutcome.WITHDRAWN)
            return None

    def _keep(self, run: Run, task: asyncio.Task[None]) -> None:
        self._tasks[run] = task
        self._by_id[run.call.request_id] = run
        task.add_done_callback(lambda _: self._forget(run))

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
            wait_s = self._config.outcome_wait_s + self._config.settle_wait_s
            await asyncio.wait(list(self._tasks.values()), timeout=wait_s)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._execution.close()

    # ------------------------------------------------------------ the sequence

    async def _run(self, run: Run) -> None:
        outcome = RequestOutcome.FAILED
        cause: BaseException | None = None
        pool = self
        try:
            pool = await self._admitted(run)
            if pool is not self:
                pool._keep(run, self._tasks[run])
                self._forget(run)
            await pool._wait_for_turn(run)
            outcome = await pool._execution.decode(run)
            pool.failing.succeeded(run.call.principal.tenant_id)
        except BaseException as exception:
            outcome, cause = outcome_of(exception), exception
            self.admission.refused(run.call, exception)
            if isinstance(exception, UpstreamFailed) and exception.is_requests:
                pool._note_failing(run.call.principal, exception.message)
            if outcome is RequestOutcome.FAILED:
                log.error("request %s failed", run.call.request_id, exc_info=exception)
            if not isinstance(exception, Exception):
                raise
        finally:
            pool._estimates.gone(run.call.request_id)
            await pool._finisher.settle(run, outcome, cause)

    def _note_failing(self, principal: Principal, why: str) -> None:
        if self.failing.failed(principal.tenant_id, why, self._clock()):
            log.warning("tenant %s is held off: its requests keep failing: %s", principal.tenant_name, why)

    async def _admitted(self, run: Run) -> Lifecycle:
        """3 and 4, here or in the next pool. Raises `NoneTook`; the run is then as it came here."""
        pool, came = self, run.call
        while True:
            try:
                await pool._admit(run)
                return pool
            except Exception as exception:
                pool._stream_limiter.leave(run.call.request_id)
                pool._estimates.gone(run.call.request_id)
                if run.call.chained is None:
                    raise
                refusal = exception
            try:
                run.enter(await run.call.chained.onward(refusal))
            except NoneTook as none:
                assert came.chained is not None, "its chain is at its end"
                run.enter(replace(came, chained=with_fields(came.chained, fallback=none.fallback)))
                raise
            assert self._elsewhere is not None, "a call with a chain belongs to several pools"
            pool = self._elsewhere(run.call)

    async def _admit(self, run: Run) -> None:
        """3 and 4, in this pool."""
        call, now_s = run.call, self._clock()
        self.failing.check(call.principal.tenant_id, now_s)
        run.predicted_output_tokens, run.predicted_high_tokens, run.predicted_tokens_to_hold = (
            self._estimates.predicted_lengths(call, (0.5, 0.9, self.reserve_quantile))
        )
        lengths = (run.predicted_output_tokens, run.predicted_high_tokens)
        if call.binding is None:
            run.estimate = self._estimates.of_call(call, now_s, lengths)
        else:
            run.estimate = call.binding.estimate
        require_bounds(call, run.estimate, run.prices)
        if call.max_wait_s is not None and run.estimate is not None and not run.estimate.is_measured:
            until_s = run.times.arrived_s + call.max_wait_s
            run.expires_s = until_s if run.expires_s is None else min(until_s, run.expires_s)
        try:
            self.admission.check(call, run.estimate, now_s, self._expires_s(run))
        except DeadlineUnreachable:
            # What it would wait for may have left, since its quote or the last replay: after a crowd was
            # cancelled, an idle server would refuse.
            is_renewed = self._estimates.forecast_cache.renew(now_s)
            if call.binding is None and not is_renewed:
                raise
            present = self._estimates.of_call(call, now_s, lengths)
            self.admission.check(call, present, now_s, self._expires_s(run))
            if call.binding is None:
                run.estimate = present
        if call.chained is not None:
            self._dispatcher.require_room(call.principal.tenant_id)  # before anything is held
        self._estimates.coming(call, now_s, lengths)
        await self._reserve(run)

    def _expires_s(self, run: Run) -> float:
        """When it leaves the queue: client's or tier's timeout, the earlier; in batch a named one alone."""
        call = run.call
        of_tier_s = run.times.arrived_s + self._queue_ttl_s[call.tier]
        if run.expires_s is None:
            return of_tier_s
        is_own = call.tier is Tier.BATCH and call.names_timeout
        return run.expires_s if is_own else min(of_tier_s, run.expires_s)

    def _take_standing(self, run: Run) -> bool:
        """Takes its present principal; whether it changed. Raises `Interrupted` if the key is refused."""
        if self._standings is None:
            return False
        principal = self._standing(run, self._standings)
        if principal is None:
            raise Interrupted(RequestOutcome.WITHDRAWN)
        if principal is run.call.principal:
            return False
        run.call = replace(run.call, principal=principal)
        return True

    async def _under_limits_in_force(self, run: Run, task: asyncio.Task[None] | None = None) -> bool:
        """Holds on limits set or changed since; returns whether its principal changed. With `task`, its own,
        it runs: it goes on whatever room they have. Without, raises `BudgetDenied` where they have none, and
        `EndUserRefused`, `QuotaStoreUnavailable`, `DatabaseUnavailable`."""
        if self._standings is None or run.leases is None:
            return False
        principal = self._standings.standing(run.call.principal.key_id, self._wall_clock())
        has_changed = principal is not run.call.principal
        if not has_changed and not any(limit.override for limit in principal.limits):
            return False
        call_id = run.call.request_id
        if not await _locked(run.accounts, task):
            return False  # it has ended
        try:
            if call_id not in self._holds.live or (task is not None and run.times.ended_s is not None):
                return False
            call = replace(run.call, principal=principal)
            in_force = {limit.identity: limit for limit in call.limits_at(self._wall_clock())}
            before = {limit.identity: limit for limit in run.leases.limits}
            if any(before.get(name) != limit for name, limit in in_force.items()):
                limits = tuple((before | in_force).values())
                answer = await self._holds.rebind(call_id, limits, must_fit=task is None)
                if isinstance(answer, Denied):
                    raise BudgetDenied(answer)
                run.leases.limits, run.limit_states = limits, answer.states
            run.call = call
            return has_changed
        finally:
            run.accounts.release()

    async def _reserve(self, run: Run) -> None:
        """4: holds what it probably needs, or nothing. Waiting for its tenant's rate it holds nothing."""
        metering = RequestMetering(run.call, run.prices, run.uses)
        self._take_standing(run)
        limits, hold = self._first_hold(run, metering)
        waits_since_s = self._clock()
        shares_rate = await self._wait_for_rate(
            run,
            fed_streams(
                limits, metering.size, self._estimates.stream_tokens_per_s(), self._holds.refill_per_s
            ),
        )
        run.limited_s += self._clock() - waits_since_s
        until_s = self._expires_s(run)
        while True:
            # Nothing is awaited between this and the hold: a limit that is in force by then binds it.
            if self._take_standing(run):
                limits, hold = self._first_hold(run, metering)
            call = run.call
            try:
                granted = await self._holds.reserve(
                    call, hold, price_version=run.prices.version, metering=metering
                )
                break
            except BudgetDenied as refused:
                denied = refused.denied
                # A request that shares its tenant's rate is not refused because others just emptied it.
                if not shares_rate or not denied.limit.is_bucket or denied.retry_after_s is None:
                    refused.fitting_max_tokens = lease.fitting_max_tokens(
                        denied, metering.size, call.sequences, call.max_tokens
                    )
                    raise
                if self._clock() + denied.retry_after_s > until_s:
                    raise
                self._estimates.gone(call.request_id)
                await _unless_interrupted(run, self._sleep(denied.retry_after_s))
                run.limited_s += denied.retry_after_s
        kept = lease.kept_tokens(limits, metering.size, call.sequences, call.kept_tokens)
        run.leases = Leases(limits, metering, call.max_tokens, kept)
        run.leases.timeline = run.timeline
        run.leases.granted(granted.covered)
        run.limit_states = granted.states

    def _first_hold(self, run: Run, metering: RequestMetering) -> tuple[tuple[Limit, ...], Hold]:
        call = run.call
        limits = call.limits_at(self._wall_clock())
        hold = lease.first_hold(
            limits,
            metering.size,
            lambda output_tokens: self._estimates.predicted_gpu_ms(call, output_tokens),
            call.sequences,
            run.predicted_tokens_to_hold * call.sequences,
            call.max_output_tokens,
            may_be_cut=call.may_be_cut,
            kept=lease.kept_tokens(limits, metering.size, call.sequences, call.kept_tokens),
        )
        return limits, hold

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
        telling: asyncio.TimerHandle | None = None
        try:
            turn = self._dispatcher.line_up(ticket)
            ahead = self._dispatcher.flow.tokens_ahead(call.request_id, self._clock())
            self._observer.in_line(run, ticket.entry, ahead)
            if not turn.done():
                run.waiting = self._estimates.waits(call.request_id, run.estimate, run.times.arrived_s)
            if call.progress or not turn.done():
                telling = self._tell(run, ticket.entry.arrived_s)
            granted = await _unless_interrupted(run, turn)
            # It may have waited for long: its key and its limits are checked again.
            while self._still_admitted(run) and await self._under_limits_in_force(run):
                pass  # they may have changed again meanwhile
            if run.interrupted.done():
                raise Interrupted(run.interrupted.result())
            run.turn = granted
        finally:
            if telling is not None:
                telling.cancel()
            self._dispatcher.leave(call.request_id)
        run.times.dispatched_s = run.turn.dispatched_s
        self._observer.dispatched(run)

    def _tell(self, run: Run, now_s: float) -> asyncio.TimerHandle | None:
        """Sends `InLine` to a waiting stream, now or when it has waited long; returns the timer."""
        waited_s = now_s - run.times.arrived_s
        in_s = told_in_s(run.call, run.estimate, waited_s, self._config.tell_after_s)
        if in_s:
            return asyncio.get_running_loop().call_later(in_s, run.events.put, InLine())
        if in_s is not None:
            run.events.put(InLine())
        return None

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
            # Queued since now: a request that took longer to reserve comes after quicker ones.
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
            # Vectors are computed input after input, and hold no KV cache until an end.
            computed + entry.predicted_output_tokens if call.task is RequestTask.COMPLETE else call.sequences,
            max_tokens=call.max_tokens,
            is_exact=call.sampling.ignore_eos,
            # Without a timeout of its client the queue applies its tier's.
            expires_s=None if run.expires_s is None else self._expires_s(run),
            reserved_cost_per_s=call.principal.reserved_tokens_per_s,
            reserved_tier=None
            if call.principal.reserved_tier is None
            else TIER_RANKS[call.principal.reserved_tier],
            prefix_hashes=call.traits.blocks
            if self._dispatcher.flow.placement.scorer.wants_prefixes and call.traits is not None
            else (),
            needs=call.needs,
        )

    def _top_up_task(self, run: Run, upstream: Callable[[], Upstream]) -> TopUpTask | None:
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
            hold_wait_s=self._config.hold_wait_s,
            accounts_wait_s=self._config.accounts_wait_s,
        )


async def _locked(lock: asyncio.Lock, task: asyncio.Task[None] | None) -> bool:
    """Acquires the lock; False where `task` ended first, which may keep it."""
    acquiring = asyncio.ensure_future(lock.acquire())
    await asyncio.wait(
        {acquiring} if task is None else {acquiring, task}, return_when=asyncio.FIRST_COMPLETED
    )
    if acquiring.done():
        return True
    acquiring.cancel()
    return False


async def _unless_interrupted(
    run: Run, waiting: Coroutine[Any, Any, Result] | Awaitable[Result], timeout_s: float | None = None
) -> Result:
    """Raises `Interrupted` when the request is interrupted, `QueueExpired` after `timeout_s`."""
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
    match cause:
        case Interrupted(outcome=outcome):
            return outcome
        case NoneTook(first=first):
            return outcome_of(first)
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
            ApiError() | NotInTime() | EstimateExceeds() | BudgetDenied() | EndUserRefused()
            | QueueRefused() | SequenceRefused() | QuotaStoreUnavailable()
            | DatabaseUnavailable() | UnknownPrice() | TooManyWaiting() | TenantHeldOff()
        ):  # fmt: skip
            return RequestOutcome.REFUSED
    return RequestOutcome.FAILED
