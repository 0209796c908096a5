"""Moves a running request to another replica, from what the gateway holds.

A sequence goes on token for token: a draw depends on its seed and the token's index alone, and what arrived
here (token ids, characters) is all that another engine of the model needs. What is recomputed is not charged.
The request waits for its new place at the head of its tenant's line and keeps its hold. Other servers' state
(generators, penalty counts, grammars) cannot be handed over: their sequences end with their server.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from functools import partial

from msgspec.structs import replace

from engine.messages import Delta, SequenceOutcome, SequenceState, Submit
from gateway.asyncio_helpers import one_of
from gateway.background import Site
from gateway.budget.holds import Holds
from gateway.dispatch.dispatcher import Dispatcher, Turn
from gateway.domain.account import ReplicaMove
from gateway.domain.ids import sequence_id
from gateway.domain.usage import SequenceUse, use_of
from gateway.requests.run import Interrupted, Run
from gateway.upstream.base import MovableUpstream, Upstream, UpstreamLost, Wording, engine_life

LOST, DRAINED = "lost", "drained"

log = logging.getLogger("fairgate.gateway.relocation")


class Relocation:
    """Use from one event loop."""

    def __init__(self, site: Site, holds: Holds, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._clock = site.clock
        self._holds = holds
        self._most_losses = site.config.moves
        self._wait_s = site.config.queue_ttl_s

    def may_move(self, run: Run) -> bool:
        """Whether what runs at its replica could go on elsewhere, once there is a place."""
        losses = sum(move.cause == LOST for move in run.replica_moves)
        return (
            run.turn is not None
            and isinstance(run.turn.upstream, MovableUpstream)
            and losses < self._most_losses
            and not run.interrupted.done()
        )

    def drain(self, run: Run) -> None:
        """Moves a request off its replica, which goes on with it until there is a place elsewhere."""
        if run.relocating is None and self.may_move(run) and self._dispatcher.has_engine:
            self._start(run, DRAINED)

    async def onward(self, run: Run, lost: Turn, error: Exception) -> None:
        """Returns once the request has another turn than `lost`, at which `error` was raised: raises it where
        the request cannot move, or finds no place in time. One move serves all its sequences."""
        if run.turn is not lost:
            return  # another sequence's loss moved it already
        if run.relocating is None:
            if not self.may_move(run):
                raise error
            self._start(run, LOST)
        moving = run.relocating
        assert moving is not None
        await one_of(moving, run.interrupted)
        if run.interrupted.done():
            moving.cancel()
            raise Interrupted(run.interrupted.result())
        if moving.cancelled() or moving.exception() is not None:
            raise error

    def _start(self, run: Run, cause: str) -> None:
        run.relocating = asyncio.create_task(self._move(run, cause), name=f"move {run.call.request_id}")
        run.relocating.add_done_callback(partial(_moved, run))

    async def _move(self, run: Run, cause: str) -> None:
        call, before, now_s = run.call, run.turn, self._clock()
        assert before is not None
        had = use_of(run.uses, call.choices, dispatched=True).served
        until_s = math.inf if cause == DRAINED else now_s + self._wait_s[call.tier]
        if cause == LOST and run.expires_s is not None and run.expires_s > now_s:
            until_s = min(until_s, run.expires_s)
        turn = await self._dispatcher.put_back(call.request_id, *had, until_s)
        after = turn.upstream
        if after is before.upstream and before.upstream.is_up and cause == DRAINED:
            run.turn = turn  # it is back in rotation
            return
        since_s = self._clock() if cause == DRAINED else now_s
        if cause == DRAINED:
            await self._hand_over(run, before.upstream, after)
        recomputed = [
            computed_tokens(use)
            for index, use in enumerate(run.uses)
            if use.outcome is None and not (index in run.handed and run.handed[index].kv)
        ]
        self._holds.sending(call.request_id, engine_life(after.ready) or after.replica_id)
        run.left_at.append(before.upstream)
        run.replica_moves.append(
            ReplicaMove(
                before.upstream.replica_id,
                after.replica_id,
                cause,
                since_s - run.times.arrived_s,
                sum(recomputed),
                since_s,
            )
        )
        run.turn = turn
        log.info("request %s goes on at %s (%s)", call.request_id, after.replica_id, cause)

    async def _hand_over(self, run: Run, upstream: Upstream, target: Upstream) -> None:
        """Takes its sequences out of an engine that serves. One that cannot be had so is cancelled there, and
        goes on from what arrived here."""
        assert isinstance(upstream, MovableUpstream)
        for index, use in enumerate(run.uses):
            if use.outcome is not None:
                continue
            name = sequence_id(run.call.request_id, index)
            try:
                with_kv = upstream.takes_kv(computed_tokens(use), target)
                state = await upstream.export_state(name, with_kv=with_kv)
            except UpstreamLost:
                upstream.cancel(name, "cancelled")
            else:
                if state is not None:
                    run.handed[index] = state


def _moved(run: Run, moving: asyncio.Task[None]) -> None:
    run.relocating = None
    if not moving.cancelled() and (failure := moving.exception()) is not None:
        log.warning("request %s does not move: %s", run.call.request_id, failure or type(failure).__name__)


def begin(run: Run, turn: Turn, index: int, submit: Submit, wording: Wording) -> AsyncIterator[Delta]:
    """Starts a sequence, or goes on with what came of it elsewhere. Raises `UpstreamUnavailable`."""
    upstream, use = turn.upstream, run.uses[index]
    state, before = run.handed.pop(index, None), run.replies.get(index)
    if isinstance(upstream, MovableUpstream) and (state is not None or use.token_ids):
        if state is None or len(state.output_token_ids) != len(use.token_ids):
            state = _state_of(use, submit)
        run.replies[index] = upstream.import_state(replace(state, submit=submit), wording, before)
    else:
        run.replies[index] = upstream.run(submit, wording)
    return run.replies[index]


def _state_of(use: SequenceUse, submit: Submit) -> SequenceState:
    return SequenceState(
        submit=submit,
        output_token_ids=use.token_ids.tolist(),
        text_sent=use.characters,
        kv_tokens=computed_tokens(use),
        cached_tokens=use.cached_tokens,
        gpu_us=use.gpu_us,
        forced_tokens=use.forced_tokens,
    )


def computed_tokens(use: SequenceUse) -> int:
    """Tokens whose keys and values its engine had: all but the last one, which was never fed back."""
    return use.prompt_tokens + len(use.token_ids) - 1 if use.token_ids else 0


def since_first_turn(outcome: SequenceOutcome, run: Run) -> SequenceOutcome:
    """The outcome of a sequence that moved, its times counted from the request's first turn. Its first token
    came from another engine."""
    assert run.turn is not None
    if not run.left_at or run.times.dispatched_s is None:
        return outcome
    later_s = run.turn.dispatched_s - run.times.dispatched_s
    return replace(
        outcome,
        scheduled_s=None if outcome.scheduled_s is None else outcome.scheduled_s + later_s,
        first_token_s=None,
        finished_s=outcome.finished_s + later_s,
        decisions=[replace(decision, at_s=decision.at_s + later_s) for decision in outcome.decisions],
        chunks=[(after_s + later_s, tokens) for after_s, tokens in outcome.chunks],
    )
