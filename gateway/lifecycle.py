"""What happens to a request, from the key to the ledger?

This module owns the sequence:

     1 authenticate   `authentication.py`, before the body is read
     2 understand     `understand.py`: a `Call`
     3 quote          what it will probably wait, take and cost
     4 reserve        hold its largest cost on every limit, and make that durable
     5 queue          behind the tenants that had less
     6 dispatch       when an engine has room
     7 decode         the engine's deltas
     8 stream         handed to whoever writes the answer
     9 settle         charge what happened, exactly once, durable before the answer ends
    10 judge          forecasts learn, metrics count

A request runs in a task of its own that nothing but the gateway's end can cancel. The HTTP side only
listens; a client that leaves, a budget that runs out, an engine that dies, a deadline that passes: each is
one named outcome of the same sequence, and `_settle` runs for every one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.messages import TIER_RANKS, Delta, Submit, TokenLogprob
from engine.scheduling.order import Entry
from gateway import errors
from gateway.account.charge import SequenceUse, Use, charge, use_of
from gateway.account.estimate import Account, Estimate, Times
from gateway.account.outcomes import RequestOutcome
from gateway.books import NOTHING, Books
from gateway.dispatcher import Closing, Dispatcher, Turn
from gateway.errors import ApiError
from gateway.estimates import Estimates
from gateway.flow.controller import Ticket
from gateway.ids import sequence_id
from gateway.metrics import Metrics
from gateway.refusals import as_api_error, outcome_of
from gateway.understand import Call
from gateway.upstream.base import Upstream, UpstreamLost
from tenants.pricing import PriceBook
from tenants.quota.store import LimitState
from tenants.types import Amounts

log = logging.getLogger("fairgate.gateway.lifecycle")


@dataclass(frozen=True, slots=True)
class Begun:
    """The first token is here: headers may go out."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one sequence."""

    index: int
    text: str
    logprobs: Sequence[TokenLogprob]


@dataclass(frozen=True, slots=True)
class Ended:
    """One sequence has ended."""

    index: int
    finish: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The request is over and settled: the last event. `error` where the answer is not complete."""

    account: Account
    error: ApiError | None


Event = Begun | Piece | Ended | Closed


class Interrupted(Exception):
    """Somebody wants no more tokens: the client left, or the gateway stops."""

    def __init__(self, outcome: RequestOutcome) -> None:
        super().__init__(outcome.value)
        self.outcome = outcome


class StoppedByEngine(Exception):
    """The engine ended a sequence in another way than by its last token."""

    def __init__(self, finish: str) -> None:
        super().__init__(finish)
        self.finish = finish


@dataclass(eq=False)
class Run:
    """One request under way: what its task knows, and what its listener may read."""

    call: Call
    times: Times
    uses: list[SequenceUse]
    held: Amounts = NOTHING
    estimate: Estimate | None = None
    limit_states: tuple[LimitState, ...] = ()
    turn: Turn | None = None
    has_begun: bool = False
    predicted_output_tokens: int = 1
    """Of each sequence, the median."""
    predicted_high_tokens: int = 1
    """Of each sequence, the 90th percentile."""
    stop_cause: str | None = None
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    """Bounded by nature: a sequence emits at most `max_tokens` deltas."""
    interrupted: asyncio.Future[RequestOutcome] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def interrupt(self, outcome: RequestOutcome) -> None:
        """No more tokens are wanted. The first reason counts."""
        if not self.interrupted.done():
            self.interrupted.set_result(outcome)

    def begin(self) -> None:
        """The first delta of any sequence is here."""
        if not self.has_begun:
            self.has_begun = True
            self.events.put_nowait(Begun())

    @property
    def output_tokens(self) -> int:
        """Emitted so far, all sequences together."""
        return sum(use.output_tokens for use in self.uses)

    @property
    def live_sequences(self) -> int:
        """Sequences without an outcome."""
        return sum(use.outcome is None for use in self.uses)


class Lifecycle:
    """Runs requests. Use from one event loop."""

    def __init__(
        self,
        *,
        books: Books,
        dispatcher: Dispatcher,
        estimates: Estimates,
        prices: PriceBook,
        metrics: Metrics,
        clock: Callable[[], float],
        outcome_wait_s: float,
        settle_wait_s: float,
    ) -> None:
        self._books = books
        self._dispatcher = dispatcher
        self._estimates = estimates
        self._prices = prices
        self._metrics = metrics
        self._clock = clock
        self._outcome_wait_s = outcome_wait_s
        self._settle_wait_s = settle_wait_s
        self._runs: dict[Run, asyncio.Task[None]] = {}
        self._stragglers: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        """Requests under way."""
        return len(self._runs)

    def begin(self, call: Call) -> Run:
        """Starts a request; the listener reads `run.events` up to `Closed`."""
        uses = [SequenceUse(len(call.prompt_of(index))) for index in range(call.sequences)]
        run = Run(call, Times(self._clock()), uses)
        task = asyncio.create_task(self._run(run), name=f"request {call.request_id}")
        self._runs[run] = task
        task.add_done_callback(lambda _: self._runs.pop(run, None))
        return run

    async def close(self, grace_s: float) -> None:
        """Lets running requests go on for `grace_s`, then interrupts and settles them."""
        self._dispatcher.refuse_waiting(Closing())
        if self._runs and grace_s > 0:
            await asyncio.wait(list(self._runs.values()), timeout=grace_s)
        for run in list(self._runs):
            run.interrupt(RequestOutcome.SHUTDOWN)
        if self._runs:
            await asyncio.wait(list(self._runs.values()), timeout=self._outcome_wait_s + self._settle_wait_s)
        for task in [*self._runs.values(), *self._stragglers]:
            task.cancel()
        await asyncio.gather(*self._runs.values(), *self._stragglers, return_exceptions=True)

    # ------------------------------------------------------------ the sequence

    async def _run(self, run: Run) -> None:
        outcome = RequestOutcome.FAILED
        error: ApiError | None = errors.internal(run.call.request_id)
        try:
            run.predicted_output_tokens = self._estimates.predicted_output_tokens(run.call)
            run.predicted_high_tokens = self._estimates.predicted_output_tokens(run.call, 0.9)
            run.estimate = self._estimates.of_call(run.call, run.times.arrived_s)
            await self._reserve(run)
            await self._wait_for_turn(run)
            outcome, error = await self._decode(run)
        except BaseException as exception:
            outcome, error = _what_became(exception, run, self._clock())
            if not isinstance(exception, Exception):
                raise
        finally:
            # A settlement must not be lost to a cancellation: it runs to its end in any case.
            await asyncio.shield(asyncio.create_task(self._settle(run, outcome, error)))

    async def _reserve(self, run: Run) -> None:
        """4: everything that it may cost at most, or nothing."""
        call = run.call
        most = self._prices.cost_nanousd(call.model, call.tier, call.input_tokens, 0, call.max_output_tokens)
        held = call.largest(most)
        granted = await self._books.reserve(call, held)
        run.held = held
        run.limit_states = granted.states

    async def _wait_for_turn(self, run: Run) -> None:
        """5 and 6: in line, until the controller lets it go or the client leaves."""
        ticket = self._ticket(run)
        self._estimates.arrived(ticket.entry)
        waiting = asyncio.create_task(self._dispatcher.turn(ticket))
        racing: set[asyncio.Future[Any]] = {waiting, run.interrupted}
        await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            raise Interrupted(run.interrupted.result())
        run.turn = waiting.result()
        run.times.dispatched_s = run.turn.dispatched_s

    def _ticket(self, run: Run) -> Ticket:
        call = run.call
        computed = sum(len(prompt) for prompt in call.prompts) * call.choices
        entry = Entry(
            entry_id=call.request_id,
            tenant_id=call.principal.tenant_id,
            # In line since now: a request that took longer to reserve stands behind those that were quicker.
            arrived_s=self._clock(),
            input_tokens=computed,
            predicted_output_tokens=run.predicted_output_tokens * call.sequences,
            tier=TIER_RANKS[call.tier],
            weight=call.principal.weight,
            predicted_high_tokens=run.predicted_high_tokens * call.sequences,
        )
        return Ticket(
            entry,
            call.sequences,
            computed + entry.predicted_output_tokens,
            max_tokens=call.max_tokens,
            is_exact=call.sampling.ignore_eos,
        )

    async def _decode(self, run: Run) -> tuple[RequestOutcome, ApiError | None]:
        """7 and 8: all sequences at once; the first failure, or an interruption, ends them all."""
        assert run.turn is not None
        upstream = run.turn.upstream
        readers: list[asyncio.Task[None]] = []
        try:
            for index in range(run.call.sequences):
                deltas = upstream.run(self._submit(run, index))
                readers.append(asyncio.create_task(self._read(run, index, deltas)))
            pending: set[asyncio.Future[Any]] = {*readers, run.interrupted}
            while any(reader in pending for reader in readers):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for reader in readers:
                    if reader in done:
                        reader.result()
                if run.interrupted in done and any(reader in pending for reader in readers):
                    raise Interrupted(run.interrupted.result())
        finally:
            await self._stop(run, upstream, readers)
        finishes = {use.outcome.finish for use in run.uses if use.outcome is not None}
        if "budget" in finishes:
            run.stop_cause = "budget"
            return RequestOutcome.BUDGET, None
        return RequestOutcome.COMPLETED, None

    def _submit(self, run: Run, index: int) -> Submit:
        call = run.call
        assert run.turn is not None
        return Submit(
            sequence_id=sequence_id(call.request_id, index),
            request_id=call.request_id,
            tenant_id=call.principal.tenant_id,
            prompt_token_ids=call.prompt_of(index),
            max_tokens=call.max_tokens,
            lease_tokens=call.max_tokens,
            sampling=call.sampling_of(index),
            index=index,
            tier=TIER_RANKS[call.tier],
            weight=call.principal.weight,
            counter=run.turn.counter,
            predicted_output_tokens=run.predicted_output_tokens,
            predicted_high_tokens=run.predicted_high_tokens,
            trace_context=call.trace_context,
        )

    async def _read(self, run: Run, index: int, deltas: AsyncIterator[Delta]) -> None:
        use = run.uses[index]
        async for delta in deltas:
            now_s = self._clock()
            run.begin()
            if delta.token_ids:
                if run.times.first_token_s is None:
                    run.times.first_token_s = now_s
                run.times.last_token_s = now_s
                use.received(len(delta.token_ids))
            if delta.text or delta.logprobs:
                run.events.put_nowait(Piece(index, delta.text, delta.logprobs))
            if delta.outcome is not None:
                use.ended(delta.outcome)
            self._dispatcher.progress(run.call.request_id, run.output_tokens, run.live_sequences)
            if delta.outcome is not None:
                if delta.outcome.finish not in ("stop", "length", "budget"):
                    raise StoppedByEngine(delta.outcome.finish)
                run.events.put_nowait(Ended(index, delta.outcome.finish))
                return
        if use.outcome is None:
            raise UpstreamLost("the stream ended without an outcome")

    async def _stop(self, run: Run, upstream: Upstream, readers: list[asyncio.Task[None]]) -> None:
        """Nothing of this request goes on: cancels what runs and waits for the engine's final counts."""
        unfinished = [reader for reader in readers if not reader.done()]
        if unfinished:
            for index, use in enumerate(run.uses):
                if use.outcome is None:
                    upstream.cancel(sequence_id(run.call.request_id, index), "cancelled")
            await asyncio.wait(unfinished, timeout=self._outcome_wait_s)
        for reader in readers:
            if reader.done():
                _ = reader.cancelled() or reader.exception()  # seen: the first one was raised, or why we stop
                continue
            # What reached us is charged. The engine's word, should it still come, is only acknowledged.
            log.warning("request %s: the engine gave no final count in time", run.call.request_id)
            straggler = asyncio.create_task(self._acknowledge_late(run, upstream, reader))
            self._stragglers.add(straggler)
            straggler.add_done_callback(self._stragglers.discard)

    async def _acknowledge_late(self, run: Run, upstream: Upstream, reader: asyncio.Task[None]) -> None:
        await asyncio.gather(reader, return_exceptions=True)
        upstream.acknowledge([use.outcome.sequence_id for use in run.uses if use.outcome is not None])

    async def _settle(self, run: Run, outcome: RequestOutcome, error: ApiError | None) -> None:
        """9 and 10. Frees the place in the window, writes the books, and tells the listener."""
        call = run.call
        run.times.ended_s = self._clock()
        taken_up = run.turn is not None and outcome not in (RequestOutcome.REFUSED, RequestOutcome.NO_ENGINE)
        use = use_of(run.uses, call.choices, dispatched=taken_up)
        charged = NOTHING
        try:
            self._dispatcher.finish(call.request_id, use.computed_tokens, use.output_tokens)
            if call.request_id in self._books.live:
                charged = self._charge(run, use)
                error = await self._write_books(run, outcome, charged, use) or error
                self._judge(run, outcome, charged)
        except Exception:
            log.exception("request %s: its settlement failed", call.request_id)
            error = errors.internal(call.request_id)
        account = Account(
            request_id=call.request_id,
            tenant=call.principal.tenant_name,
            tier=call.tier.value,
            outcome=outcome.value,
            stop_cause=run.stop_cause,
            estimate=run.estimate,
            times=run.times,
            held=run.held,
            charged=charged,
            cached_tokens=use.cached_tokens,
            preemptions=sum(each.outcome.preemptions for each in run.uses if each.outcome is not None),
            decisions=[
                decision
                for each in run.uses
                if each.outcome is not None
                for decision in each.outcome.decisions
            ],
        )
        run.events.put_nowait(Closed(account, error))

    def _charge(self, run: Run, use: Use) -> Amounts:
        call = run.call
        cost = self._prices.cost_nanousd(
            call.model, call.tier, use.input_tokens, use.cached_tokens, use.output_tokens
        )
        charged = charge(use, cost, run.held)
        if charged.output_tokens < use.output_tokens or charged.input_tokens < use.input_tokens:
            log.error("request %s used more than it held: %s of %s", call.request_id, use, run.held)
        return charged

    async def _write_books(
        self, run: Run, outcome: RequestOutcome, charged: Amounts, use: Use
    ) -> ApiError | None:
        """The settlement; an error when it takes too long to wait for (it goes on by itself)."""
        outcomes = [each.outcome for each in run.uses if each.outcome is not None]
        sequence_ids = [each.sequence_id for each in outcomes]
        upstream = run.turn.upstream if run.turn is not None else None

        def acknowledge() -> None:
            if upstream is not None and sequence_ids:
                upstream.acknowledge(sequence_ids)

        detail = {
            "held": [run.held.input_tokens, run.held.output_tokens, run.held.cost_nanousd],
            "cached_tokens": use.cached_tokens,
            "wait_s": run.times.wait_s,
            "ttft_s": run.times.ttft_s,
            "e2e_s": run.times.e2e_s,
            "finish": sorted({each.finish for each in outcomes}),
            "engine_counted": len(outcomes),
        }
        settlement = self._books.settle(run.call, charged, outcome, detail, acknowledge)
        try:
            async with asyncio.timeout(self._settle_wait_s):
                await settlement.durable.wait()
        except TimeoutError:
            return errors.settlement_pending()
        return None

    def _judge(self, run: Run, outcome: RequestOutcome, charged: Amounts) -> None:
        call = run.call
        if outcome in (RequestOutcome.COMPLETED, RequestOutcome.BUDGET):
            for each in run.uses:
                self._estimates.learn(call, each.output_tokens)
        self._metrics.ended(
            outcome.value,
            call.tier.value,
            run.times,
            charged.input_tokens,
            charged.output_tokens,
            charged.cost_nanousd,
        )


def _what_became(exception: BaseException, run: Run, now_s: float) -> tuple[RequestOutcome, ApiError]:
    """The named outcome behind an exception, and what the client is told."""
    call = run.call
    match exception:
        case Interrupted(outcome=RequestOutcome.SHUTDOWN) | asyncio.CancelledError():
            return RequestOutcome.SHUTDOWN, errors.shutting_down()
        case Interrupted(outcome=outcome):
            return outcome, errors.client_left()
        case StoppedByEngine(finish="expired"):
            return RequestOutcome.EXPIRED, errors.engine_failed()
        case StoppedByEngine(finish="cancelled") | UpstreamLost():
            # Cancelled without our asking: the engine gave this gateway up, which is as good as lost.
            return RequestOutcome.ENGINE_LOST, errors.engine_lost(run.output_tokens)
        case StoppedByEngine():
            return RequestOutcome.ENGINE_FAILED, errors.engine_failed()
    waited_s = now_s - run.times.arrived_s
    return outcome_of(exception), as_api_error(exception, call.request_id, waited_s, call.tier.value)
