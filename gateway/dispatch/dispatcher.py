"""Wakes waiting requests when the queue dispatches them.

The asynchronous edge of the queue (`queue_backend.py`). Decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from engine.messages import TenantShare
from engine.step_time.model import PRIOR
from gateway.background import every
from gateway.dispatch.queue_backend import LocalQueue, QueueBackend
from gateway.flow.controller import Dispatch, Displaced, FlowController, QueueFull, Ticket
from gateway.flow.types import RESUMES, Deadlines
from gateway.flow.window import Replica
from gateway.upstream.base import CapabilityLost, MovableUpstream, Upstream, engine_life, takes_turns
from gateway.upstream.replica_set import ReplicaSet
from tenants.storage.task_stop import stop

SWEEP_S = 0.25
"""How often deadlines in the queue are checked."""

log = logging.getLogger("fairgate.gateway.dispatcher")


class QueueRefused(Exception):
    def __init__(self, full: QueueFull) -> None:
        super().__init__(f"queue full: {full.limit}")
        self.full = full


class QueueExpired(Exception):
    """The request waited longer than its tier allows."""


class NoEngineAvailable(Exception):
    """No engine serves, and none came back in time. `is_drained`: those that would are drained."""

    def __init__(self, *, is_drained: bool = False) -> None:
        super().__init__("every replica that serves is drained" if is_drained else "no replica serves")
        self.is_drained = is_drained


class Closing(Exception):
    """The gateway stops."""


class Turn(msgspec.Struct, frozen=True):
    """A request's turn on this upstream."""

    upstream: Upstream
    counter: int
    dispatched_s: float
    tier: int | None = None
    """Its rank at the engine, if a long wait or a reservation raised it."""
    by_reservation: bool = False
    displaced: tuple[Displaced, ...] = ()
    """This gateway's requests whose places it takes."""
    is_owed: bool = False
    """At the engine it may take the place of a tenant of its tier that has had more."""
    had: int = 0
    heard: int = 0
    engine_life: str = ""
    """See `Dispatch`."""

    @property
    def heard_now(self) -> int:
        """`Submit.heard` for its engine: 0 if that was restarted."""
        return self.heard if self.engine_life == engine_life(self.upstream.ready) else 0


class Dispatcher:
    """One task, one queue, any number of waiting requests. Use from one event loop."""

    def __init__(
        self,
        flow: FlowController,
        upstreams: ReplicaSet,
        clock: Callable[[], float],
        *,
        engine_grace_s: float,
        state: QueueBackend | None = None,
    ) -> None:
        """`state`: the queue's backend, of which `flow` is this gateway's part; None: in this process."""
        self.flow = flow
        self._backend = state or LocalQueue(flow)
        self._upstreams = upstreams
        self._clock = clock
        self._engine_grace_s = engine_grace_s
        self._turns: dict[str, asyncio.Future[Turn]] = {}
        self._down_since_s: float | None = None
        self._offered: frozenset[frozenset[str]] = frozenset()
        """Capabilities of each serving replica at the last check."""
        self._closing = False
        self._pump_scheduled = False
        self._task: asyncio.Task[None] | None = None
        self._backend.bind(self.replicas, self._woken, self._refused)
        upstreams.each(self._joined)
        upstreams.on_left(self._left)

    @property
    def has_engine(self) -> bool:
        return any(takes_turns(upstream) for upstream in self._upstreams)

    def no_engine(self) -> NoEngineAvailable:
        return NoEngineAvailable(is_drained=any(upstream.is_up for upstream in self._upstreams))

    def replicas(self) -> list[Replica]:
        sizes: list[Replica] = []
        for upstream in self._upstreams:
            ready = upstream.ready
            if takes_turns(upstream) and ready is not None:
                snapshot = upstream.snapshot
                sizes.append(
                    Replica(
                        upstream.replica_id,
                        ready.max_sequences,
                        ready.num_blocks * ready.block_tokens,
                        snapshot.step_time if snapshot is not None else PRIOR,
                        ready.max_batched_tokens,
                        pauses=bool(ready.policy),  # other servers name none
                        reports=bool(ready.policy),
                        life=engine_life(ready),
                        offers=upstream.capabilities.offers
                        | ({RESUMES} if isinstance(upstream, MovableUpstream) else frozenset()),
                    )
                )
        return sizes

    def start(self) -> None:
        self._backend.start()
        self._task = asyncio.create_task(
            every(SWEEP_S, self._sweep, log, "the dispatcher's sweep failed; it goes on"),
            name="gateway dispatcher",
        )

    async def close(self) -> None:
        self.refuse_waiting(Closing())
        if self._task is not None:
            await stop([self._task])
        await self._backend.close()

    def require_order(self, name: str) -> None:
        """Raises `UnknownPolicy` for an order that the backend does not support."""
        self._backend.require_order(name)

    def refuse_waiting(self, error: Exception) -> None:
        """Ends every wait with `error`, and all later ones if that is `Closing`."""
        self._closing = self._closing or isinstance(error, Closing)
        for entry_id in list(self._turns):
            self._fail(entry_id, error)

    def require_room(self, tenant_id: str) -> None:
        """Raises `QueueRefused` if `line_up` would. Of a shared queue only local requests are known."""
        full = self.flow.full(tenant_id)
        if full is not None:
            raise QueueRefused(full)

    def line_up(self, ticket: Ticket) -> asyncio.Future[Turn]:
        """Queues a request; its turn may have come already. The caller must `leave` afterwards, also when
        giving up; a turn at that moment counts as dispatched, and the caller's `finish` ends it.

        The future, or this call, raises `QueueRefused`, `QueueExpired`, `NoEngineAvailable`,
        `CapabilityLost`, `QuotaStoreUnavailable`, `Closing`.
        """
        if self._closing:
            raise Closing
        if (lacking := self._lacking(ticket)) is not None:
            raise CapabilityLost(lacking)
        entry_id = ticket.entry.entry_id
        full = self._backend.enqueue(ticket, self._clock())
        if full is not None:
            raise QueueRefused(full)
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._turns[entry_id] = future
        self.pump()
        return future

    def leave(self, entry_id: str) -> None:
        self._turns.pop(entry_id, None)
        self._backend.cancel(entry_id, self._clock())

    def move(self, entry_id: str, tier: int, deadlines_s: Deadlines | None = None) -> bool:
        """Changes a waiting request's tier (a rank) and deadlines; False if it does not wait."""
        moved = self._backend.move(entry_id, tier, self._clock(), deadlines_s)
        self.pump()
        return moved

    def progress(self, entry_id: str, output_tokens: int, live_sequences: int) -> None:
        """A sequence that ended may make room."""
        self._backend.progress(entry_id, output_tokens, live_sequences)
        self.pump_soon()

    def foresee(self, entry_id: str, foreseen_tokens: tuple[int, int]) -> None:
        """The engine's forecast of the answer's length; a shorter one may make room."""
        self._backend.foresee(entry_id, foreseen_tokens, self._clock())
        self.pump_soon()

    def finish(self, entry_id: str, input_tokens: int, output_tokens: int) -> None:
        """It is over: also one that waits for another place."""
        self._turns.pop(entry_id, None)
        self._backend.finish(entry_id, input_tokens, output_tokens, self._clock())
        self.pump()

    def put_back(
        self, entry_id: str, input_tokens: int, output_tokens: int, expires_s: float | None
    ) -> asyncio.Future[Turn]:
        """A dispatched request has to go on elsewhere: it waits at the head of its tenant's line, charged for
        what it had. `expires_s`: as `Ticket.expires_s`. As `line_up` otherwise; it is not refused as full."""
        if self._closing:
            raise Closing
        now_s = self._clock()
        if not self._backend.put_back(entry_id, input_tokens, output_tokens, now_s, expires_s):
            raise NoEngineAvailable
        future = self._turns[entry_id] = asyncio.get_running_loop().create_future()
        self.pump()
        return future

    def _joined(self, upstream: Upstream) -> None:
        upstream.watch(partial(self._changed, upstream))
        upstream.listen(partial(self._served, upstream))
        self._backend.member(upstream.replica_id, is_out=upstream.is_drained)
        if upstream.is_up:
            self._changed(upstream)

    def _left(self, upstream: Upstream) -> None:
        self.flow.placement.scorer.forget(upstream.replica_id)
        self._backend.member(upstream.replica_id, is_out=True)
        self.pump_soon()

    def _served(self, upstream: Upstream, service: Mapping[str, TenantShare]) -> None:
        """The service of a step, before what it emitted is read."""
        self._backend.heard(upstream.replica_id, engine_life(upstream.ready), service)

    def _changed(self, upstream: Upstream) -> None:
        """The upstream came up, was drained or resumed, or was lost: then its cache is empty."""
        if not upstream.is_up:
            self.flow.placement.scorer.forget(upstream.replica_id)
        if upstream in self._upstreams:
            self._backend.member(upstream.replica_id, is_out=upstream.is_drained)
        self._refuse_unable()
        self.pump_soon()

    def _lacking(self, ticket: Ticket) -> str | None:
        """A need that every serving replica lacks; None: one can run it, or none serves."""
        able = [
            upstream.capabilities for upstream in self._upstreams if takes_turns(upstream) and upstream.ready
        ]
        lacking = [capabilities.lacks(ticket.needs - {RESUMES}) for capabilities in able]
        return lacking[0] if lacking and None not in lacking else None

    def _refuse_unable(self) -> None:
        """Ends the wait of requests that no serving replica can run."""
        offered = frozenset(
            upstream.capabilities.offers
            for upstream in self._upstreams
            if takes_turns(upstream) and upstream.ready
        )
        if offered == self._offered:
            return
        self._offered = offered
        for ticket in list(self.flow.queue.tickets()):
            if (lacking := self._lacking(ticket)) is not None:
                self._fail(ticket.entry.entry_id, CapabilityLost(lacking))

    def pump_soon(self) -> None:
        """`pump` once, at the loop's next iteration: one step ends many sequences."""
        if not self._pump_scheduled and self._backend.may_have_turns:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump_scheduled_now)

    def _pump_scheduled_now(self) -> None:
        self._pump_scheduled = False
        self.pump()

    def pump(self) -> None:
        self._backend.pump(self._clock())

    def _woken(self, turns: list[Dispatch]) -> None:
        now_s = self._clock()
        for turn in turns:
            self._wake(turn, now_s)

    def _refused(self, entry_id: str, full: QueueFull) -> None:
        future = self._turns.get(entry_id)
        if future is not None and not future.done():
            future.set_exception(QueueRefused(full))

    def _wake(self, turn: Dispatch, now_s: float) -> None:
        entry_id = turn.ticket.entry.entry_id
        future = self._turns.get(entry_id)
        if future is None or future.done():
            # Its client left between the decision and now: the place is free again.
            self._backend.finish(entry_id, 0, 0, now_s)
            return
        upstream = self._upstreams.named(turn.replica_id)
        if upstream is None or upstream.is_drained:
            # Decided elsewhere, by the members of a moment ago: it waits again, where it stood.
            self._backend.put_back(entry_id, *turn.ticket.had, now_s, turn.ticket.expires_s)
            self.pump_soon()
            return
        if (lacking := upstream.capabilities.lacks(turn.ticket.needs - {RESUMES})) is not None:
            # Decided for it elsewhere, by what that replica could do a moment ago.
            self._backend.finish(entry_id, 0, 0, now_s)
            future.set_exception(CapabilityLost(lacking))
            return
        future.set_result(
            Turn(
                upstream,
                turn.counter,
                now_s,
                turn.tier,
                turn.by_reservation,
                turn.displaced,
                turn.is_owed,
                turn.had,
                turn.heard,
                turn.engine_life,
            )
        )

    def _fail(self, entry_id: str, error: Exception) -> None:
        self._backend.cancel(entry_id, self._clock())
        future = self._turns.get(entry_id)
        if future is not None and not future.done():
            future.set_exception(error)

    def _sweep(self) -> None:
        now_s = self._clock()
        self._refuse_unable()
        for ticket in self._backend.expire(now_s):
            self._fail(ticket.entry.entry_id, QueueExpired())
        if self.has_engine:
            self._down_since_s = None
        elif self._down_since_s is None:
            self._down_since_s = now_s
        elif now_s - self._down_since_s >= self._engine_grace_s:
            # What ran before waits until its own deadline: an engine may come back for it.
            new = [ticket.entry.entry_id for ticket in self.flow.queue.tickets() if ticket.before is None]
            for entry_id in new:
                self._fail(entry_id, self.no_engine())
        self.pump()
