"""Executes a dispatched request: its sequences on an upstream, from submission to the last token.

Sequences are submitted together; `gateway/budget/top_up.py` keeps their leases ahead. The first failure or
interruption ends them all; each final count is taken from the engine, if it still answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container
from typing import Any

from msgspec.structs import replace

from engine.messages import TIER_RANKS, Delta, Submit
from gateway.asyncio_helpers import one_of
from gateway.background import Site
from gateway.budget import token_cap
from gateway.budget.holds import Holds
from gateway.budget.top_up import TopUpTask
from gateway.dispatch.dispatcher import Dispatcher
from gateway.domain.ids import sequence_id
from gateway.requests.relocation import Relocation, begin, since_first_turn
from gateway.requests.run import Interrupted, Run, SequenceEnded, SequenceOutput
from gateway.tracing.build import CHAT, client_span
from gateway.upstream.base import (
    ReaderTooSlow,
    Upstream,
    UpstreamLost,
    UpstreamUnavailable,
    Wording,
    engine_life,
)
from tenants.outcomes import RequestOutcome
from tenants.storage.task_stop import stop

FINISHES = ("stop", "length", "budget")
"""Finish reasons of sequences without failure."""

log = logging.getLogger("fairgate.gateway.decoding")


class StoppedByEngine(Exception):
    """The engine ended a sequence other than by its last token."""

    def __init__(self, finish: str) -> None:
        super().__init__(finish)
        self.finish = finish


class Execution:
    """Use from one event loop."""

    def __init__(
        self,
        site: Site,
        holds: Holds,
        dispatcher: Dispatcher,
        relocation: Relocation,
        make_top_up_task: Callable[[Run, Callable[[], Upstream]], TopUpTask | None],
    ) -> None:
        self._dispatcher = dispatcher
        self._make_top_up_task = make_top_up_task
        self._clock = site.clock
        self._relocation = relocation
        self._holds = holds
        self._outcome_wait_s = site.config.outcome_wait_s
        self._slow_reader_s = site.config.slow_reader_s
        self._stragglers: set[asyncio.Task[None]] = set()

    async def decode(self, run: Run) -> RequestOutcome:
        """Runs all sequences to the end. Raises `Interrupted`, `StoppedByEngine`, `AccountsLost` and what
        upstreams raise; nothing of the request runs any more then."""
        upstream = _place_of(run)
        # If this gateway stalled while the request waited, another one may have settled it.
        self._holds.sending(run.call.request_id, engine_life(upstream.ready) or upstream.replica_id)
        top_up_task = self._make_top_up_task(run, lambda: _place_of(run))
        top_ups = [asyncio.create_task(top_up_task.run())] if top_up_task is not None else []
        readers: list[asyncio.Task[None]] = []
        cancelled: set[int] = set()

        def cancel(index: int) -> None:
            if run.uses[index].outcome is None and index not in cancelled:
                cancelled.add(index)
                _place_of(run).cancel(sequence_id(run.call.request_id, index), "cancelled")

        try:
            for index in range(run.call.sequences):
                readers.append(asyncio.create_task(self._read(run, index, top_up_task, cancel, cancelled)))
            if upstream.is_drained:
                self._relocation.drain(run)  # it was drained after its turn
            if run.get_ready is not None:
                asyncio.get_running_loop().call_soon(run.get_ready, run)  # once the readers have sent it
            pending: list[asyncio.Future[Any]] = [*readers, *top_ups]
            while not all(map(asyncio.Task.done, readers)):
                await one_of(*pending, run.interrupted)
                for task in pending:
                    if task.done():
                        task.result()
                pending = [task for task in pending if not task.done()]
                if run.interrupted.done() and not all(map(asyncio.Task.done, readers)):
                    raise Interrupted(run.interrupted.result())
        finally:
            await self._stop(run, readers, cancel)
            # Asked once, unlike what `stop` does: a running top-up must end before the request is settled.
            for top_up in top_ups:
                top_up.cancel()
            if top_ups:
                await asyncio.gather(*top_ups, return_exceptions=True)
        finishes = {use.outcome.finish for use in run.uses if use.outcome is not None}
        if "budget" in finishes:
            run.stop_cause = "budget"
            return RequestOutcome.BUDGET
        return RequestOutcome.COMPLETED

    async def close(self) -> None:
        await stop(self._stragglers)

    async def _read(
        self,
        run: Run,
        index: int,
        top_up_task: TopUpTask | None,
        cancel: Callable[[int], None],
        cancelled: Container[int],
    ) -> None:
        """Reads a sequence to its end, also past the loss of its engine."""
        use = run.uses[index]
        while use.outcome is None:
            turn = run.turn
            assert turn is not None
            given_up: Delta | None = None
            try:
                async for delta in begin(
                    run, turn, index, _submit(run, index, self._clock()), _wording(run, index)
                ):
                    if self._is_given_up(run, delta) and index not in cancelled:
                        given_up = delta
                        continue
                    await self._take(run, index, delta)
                    if run.interrupted.done():
                        # Before the next delta is read, which would signal room for more to the engine.
                        cancel(index)
                    if top_up_task is not None:
                        top_up_task.seen(index)
                if use.outcome is None:
                    raise UpstreamLost("the stream ended without an outcome")
            except ReaderTooSlow:
                if given_up is not None:
                    await self._take(run, index, given_up)
                run.interrupt(RequestOutcome.SLOW_READER)
                raise Interrupted(RequestOutcome.SLOW_READER) from None
            except (UpstreamLost, UpstreamUnavailable) as error:
                await self._relocation.onward(run, turn, error)
        if use.outcome.finish not in FINISHES:
            if run.interrupted.done():
                raise Interrupted(run.interrupted.result())
            raise StoppedByEngine(use.outcome.finish)

    def _is_given_up(self, run: Run, delta: Delta) -> bool:
        """Cancelled without our asking: its engine stops, or took this gateway for dead. Its other words are
        left aside, as the sequence goes on where they are computed again."""
        outcome = delta.outcome
        return outcome is not None and outcome.finish == "cancelled" and self._relocation.may_move(run)

    async def _take(self, run: Run, index: int, delta: Delta) -> None:
        use = run.uses[index]
        use.received(delta)
        if delta.token_ids:
            now_s = self._clock()
            if run.times.first_token_s is None:
                run.times.first_token_s = now_s
            run.times.last_token_s = now_s
            run.resumed(now_s)
        if delta.token_ids or delta.outcome is not None:
            run.begin()
        has_output = delta.text or delta.logprobs or delta.parts
        if has_output and await run.has_room(self._slow_reader_s, self._clock):
            run.events.put(SequenceOutput(index, delta.text, delta.logprobs, delta.parts))
        if delta.outcome is not None:
            use.ended(since_first_turn(delta.outcome, run))
        self._dispatcher.progress(run.call.request_id, run.sampled_tokens, run.live_sequences)
        if delta.foreseen_tokens is not None and delta.outcome is None:
            self._dispatcher.foresee(run.call.request_id, run.foreseen_tokens)
        if delta.outcome is not None and delta.outcome.finish in FINISHES:
            run.events.put(SequenceEnded(index, delta.outcome.finish, delta.outcome))

    async def _stop(self, run: Run, readers: list[asyncio.Task[None]], cancel: Callable[[int], None]) -> None:
        if run.relocating is not None:
            run.relocating.cancel()
        unfinished = [reader for reader in readers if not reader.done()]
        if unfinished:
            for index in range(len(run.uses)):
                cancel(index)
            await asyncio.wait(unfinished, timeout=self._outcome_wait_s)
        for reader in readers:
            if reader.done():
                _ = reader.cancelled() or reader.exception()  # seen: the first one was raised, or why we stop
                continue
            # What reached us is charged. A late final count of the engine is only acknowledged.
            log.warning("request %s: the engine gave no final count in time", run.call.request_id)
            straggler = asyncio.create_task(self._acknowledge_late(run, _place_of(run), reader))
            self._stragglers.add(straggler)
            straggler.add_done_callback(self._stragglers.discard)

    async def _acknowledge_late(self, run: Run, upstream: Upstream, reader: asyncio.Task[None]) -> None:
        await asyncio.gather(reader, return_exceptions=True)
        upstream.acknowledge([use.outcome.sequence_id for use in run.uses if use.outcome is not None])


def _place_of(run: Run) -> Upstream:
    assert run.turn is not None
    return run.turn.upstream


def _submit(run: Run, index: int, now_s: float) -> Submit:
    call = run.call
    assert run.turn is not None
    assert run.leases is not None
    return Submit(
        sequence_id=sequence_id(call.request_id, index),
        request_id=call.request_id,
        tenant_id=call.principal.tenant_id,
        prompt_token_ids=call.prompt_of(index),
        max_tokens=call.max_tokens,
        lease_tokens=run.leases.tokens[index],
        lease_gpu_us=run.leases.gpu_us[index],
        sampling=call.sampling_of(index),
        index=index,
        tier=TIER_RANKS[call.tier] if run.turn.tier is None else run.turn.tier,
        weight=call.principal.weight,
        counter=run.turn.counter,
        had=run.turn.had,
        heard=run.turn.heard_now,
        is_owed=run.turn.is_owed,
        predicted_output_tokens=run.predicted_output_tokens,
        predicted_high_tokens=run.predicted_high_tokens,
        **run.targets.for_engine(now_s),
        trace_context=None if run.trace is None else run.trace.traceparent(CHAT),
        grammar=call.grammar and replace(call.grammar, kept_tokens=run.leases.kept),
        parts=call.parts,
    )


def _wording(run: Run, index: int) -> Wording:
    """What the client wrote and, for servers without leases, how much of an answer could be held."""
    call = run.call
    wording = call.wording_of(index)
    if not call.stream:
        wording = replace(wording, is_streamed=False)
    if run.trace is not None:
        wording = replace(wording, trace_headers=run.trace.onward(client_span(index)))
    if not call.may_be_cut:
        return wording  # its worst case is promised to it
    return replace(wording, most_tokens=lambda: _most_tokens(run))


def _most_tokens(run: Run) -> int:
    leases = run.leases
    assert leases is not None
    return token_cap.most_tokens(
        leases.covered,
        leases.covered_output_tokens,
        run.limit_states,
        leases.counting.size,
        run.call.sequences,
        run.call.max_tokens,
    )
