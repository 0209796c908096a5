"""State of a running request, and its listener's events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.messages import Delta, SequenceOutcome, SequenceState, TokenLogprob
from gateway.budget.top_up import Leases
from gateway.dispatch.dispatcher import Turn
from gateway.domain.account import Account, ReplicaMove, TierMove
from gateway.domain.call import Call
from gateway.domain.estimate import Estimate, Times
from gateway.domain.quote_redemption import Redemption
from gateway.domain.targets import NO_TARGETS, RequestTargets
from gateway.domain.timeline import Timeline, TimelineKind, lags_s
from gateway.domain.usage import SequenceUse
from gateway.estimates.overdue import WatchedWait
from gateway.trace_context import RequestTrace
from gateway.tracing.decision import KeepCause
from gateway.upstream.base import Part, Upstream
from tenants.outcomes import RequestOutcome
from tenants.pricing.pricing import PriceBook
from tenants.quota.store import LimitState
from tenants.types import NOTHING, Amounts

SHORTEST_LAG_S = 0.25
"""An engine reads no command during a step: shorter lags may be its own."""
PIECE_BYTES = 100
"""Overhead of a piece of text, and of each of its log probabilities."""


@dataclass(frozen=True, slots=True)
class InLine:
    """The request is queued, and its client gets progress from now on (`queue_progress.told_in_s`)."""


@dataclass(frozen=True, slots=True)
class Silence:
    """No event for a while; only for listeners that asked for it."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The first token is here: headers may go out."""


class SequenceOutput(msgspec.Struct, frozen=True):
    """What one step added to one sequence."""

    index: int
    text: str
    logprobs: Sequence[TokenLogprob]
    parts: Sequence[Part] = ()
    """What is not plain text; it precedes `text`."""

    @property
    def num_bytes(self) -> int:
        """About its size in memory and on the wire."""
        found = PIECE_BYTES + len(self.text)
        if self.parts:
            found += len(msgspec.json.encode(self.parts)) + PIECE_BYTES * len(self.parts)
        for logprob in self.logprobs:
            found += PIECE_BYTES * (1 + len(logprob.top)) + len(logprob.text)
        return found


class SequenceEnded(msgspec.Struct, frozen=True):
    index: int
    finish: str
    outcome: SequenceOutcome | None = None


class Closed(msgspec.Struct, frozen=True):
    """The request is settled: the last event. `cause` if the answer is not complete."""

    account: Account
    cause: BaseException | None


Event = InLine | Silence | Begun | SequenceOutput | SequenceEnded | Closed


class Interrupted(Exception):
    """No more tokens are wanted."""

    def __init__(self, outcome: RequestOutcome) -> None:
        super().__init__(outcome.value)
        self.outcome = outcome


class Events:
    """The listener's queue. Only pieces of text wait for room: the few other events must get through."""

    def __init__(self, most: int, *, most_bytes: int, is_whole: bool = False) -> None:
        """`is_whole`: the listener is woken only by the last event and takes all together."""
        self.most = most
        self.most_bytes = most_bytes
        self.most_waiting = 0
        self._waiting: deque[Event] = deque()
        self._waiting_bytes = 0
        self._is_withheld = is_whole
        self._listener: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return 0 if self._is_withheld else len(self._waiting)

    @property
    def has_room(self) -> bool:
        return self._is_withheld or (len(self._waiting) < self.most and self._waiting_bytes < self.most_bytes)

    async def wait_for_room(self) -> None:
        while not self.has_room:
            if self._writer is None or self._writer.done():
                self._writer = asyncio.get_running_loop().create_future()
            await self._writer

    def put(self, event: Event) -> None:
        self._waiting.append(event)
        if isinstance(event, SequenceOutput):
            self._waiting_bytes += event.num_bytes
        if self._is_withheld:
            if not isinstance(event, Closed):
                return
            self._is_withheld = False
        self.most_waiting = max(self.most_waiting, len(self._waiting))
        _wake(self._listener)

    async def get(self) -> Event:
        """For one listener."""
        while not len(self):
            self._listener = asyncio.get_running_loop().create_future()
            await self._listener
        _wake(self._writer)
        event = self._waiting.popleft()
        if isinstance(event, SequenceOutput):
            self._waiting_bytes -= event.num_bytes
        return event

    def take(self) -> list[Event]:
        if not len(self):
            return []
        _wake(self._writer)
        found = list(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        return found


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def uses_of(call: Call) -> list[SequenceUse]:
    return [SequenceUse(len(call.prompt_of(index))) for index in range(call.sequences)]


@dataclass(eq=False)
class Run:
    """One request: the state of its task, which its listener may read."""

    call: Call
    """Its chain may replace it before it holds anything, a move to another tier while it waits."""
    times: Times
    uses: list[SequenceUse]
    prices: PriceBook
    """At its arrival: it is held and charged by these, whatever is set meanwhile."""
    events: Events
    leases: Leases | None = None
    estimate: Estimate | None = None
    limit_states: tuple[LimitState, ...] = ()
    turn: Turn | None = None
    has_begun: bool = False
    predicted_output_tokens: int = 1
    predicted_high_tokens: int = 1
    predicted_tokens_to_hold: int = 1
    """Each per sequence: median, 90th percentile, the reserved quantile."""
    stop_cause: str | None = None
    trace: RequestTrace | None = None
    kept_for: KeepCause | None = None
    redemption: Redemption | None = None
    settled_s: float | None = None
    """When its settlement was durable, or given up waiting for."""
    expires_s: float | None = None
    """By its client's timeout, on the gateway's clock; a tier's own limit may be earlier."""
    targets: RequestTargets = NO_TARGETS
    in_line: bool = False
    """It is or was queued."""
    in_line_s: float | None = None
    waiting: WatchedWait | None = None
    limited_s: float = 0.0
    """How long its tenant's own limits kept it out of the queue."""
    get_ready: Callable[[Run], object] | None = None
    """Called while an upstream works on it, to prepare the answer."""
    timeline: Timeline = field(default_factory=Timeline)
    moves: list[TierMove] = field(default_factory=list)
    replica_moves: list[ReplicaMove] = field(default_factory=list)
    relocating: asyncio.Task[None] | None = None
    """While it waits for a place elsewhere."""
    left_at: list[Upstream] = field(default_factory=list)
    """Replicas where it ran before: each keeps an outcome until that is acknowledged."""
    replies: dict[int, AsyncIterator[Delta]] = field(default_factory=dict)
    """What is read of its sequences."""
    handed: dict[int, SequenceState] = field(default_factory=dict)
    """By sequence, its state as a drained replica gave it out."""
    accounts: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its hold changes with its tier, and never released once it is settled."""
    withdrawn_because: str = ""
    """Why its key is refused now, as the directory names it; empty: it is not."""
    interrupted: asyncio.Future[RequestOutcome] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def enter(self, call: Call) -> None:
        """Takes the call of another pool, with the prompt as that pool counts it, before anything is held."""
        self.call = call
        self.uses = uses_of(call)
        self.estimate = None

    @property
    def read_s(self) -> float:
        """From its first byte until it had been read and parsed."""
        first_s = self.call.first_byte_s
        return 0.0 if first_s is None else max(0.0, self.times.arrived_s - first_s)

    @property
    def before_line_s(self) -> float:
        """From its first byte to the queue, without the wait for its tenant's limits."""
        in_line_s = self.times.arrived_s if self.in_line_s is None else self.in_line_s
        return max(0.0, self.read_s + in_line_s - self.times.arrived_s - self.limited_s)

    @property
    def outcomes(self) -> list[SequenceOutcome]:
        return [use.outcome for use in self.uses if use.outcome is not None]

    @property
    def lag_s(self) -> float:
        """How late the first token was here, from `SHORTEST_LAG_S` on: the gateway's own stalls."""
        lag_s, _ = lags_s(self.timeline, self.times, self.outcomes)
        return lag_s if lag_s >= SHORTEST_LAG_S else 0.0

    @property
    def status(self) -> str:
        """`limited` (held back by its tenant's own limits), `waiting` (queued), `running` or `ended`."""
        if self.times.ended_s is not None:
            return "ended"
        if self.turn is not None:
            return "running"
        return "waiting" if self.in_line else "limited"

    def interrupt(self, outcome: RequestOutcome) -> None:
        """The first reason counts."""
        if not self.interrupted.done():
            self.interrupted.set_result(outcome)

    def begin(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.events.put(Begun())

    def resumed(self, now_s: float) -> None:
        """A token came: a move to another replica is over."""
        if self.replica_moves and (move := self.replica_moves[-1]).pause_s is None:
            move.pause_s = now_s - move.since_s
            waited_us = round(move.pause_s * 1e6)
            self.timeline.note(TimelineKind.RELOCATED, move.since_s, waited_us, move.recomputed_tokens)

    async def has_room(self, timeout_s: float, now_s: Callable[[], float]) -> bool:
        """Waits until the listener has room for more. False: it is too slow, or gone."""
        if self.interrupted.done():
            return False
        if self.events.has_room:
            return True
        waiting = asyncio.create_task(self.events.wait_for_room())
        racing: set[asyncio.Future[Any]] = {waiting, self.interrupted}
        since_s = now_s()
        await asyncio.wait(racing, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        self.timeline.note(TimelineKind.STALLED, since_s, round((now_s() - since_s) * 1e6))
        if waiting.done():
            return not self.interrupted.done()
        waiting.cancel()
        self.interrupt(RequestOutcome.SLOW_READER)
        return False

    @property
    def held(self) -> Amounts:
        """In tokens as they are billed."""
        if self.leases is None:
            return NOTHING
        covered = self.leases.covered
        return Amounts(
            self.call.input_tokens,
            self.leases.covered_output_tokens,
            covered.cost_nanousd,
            covered.requests,
            covered.gpu_ms,
        )

    @property
    def sampled_tokens(self) -> int:
        """Output, but for what a grammar forced: that much service."""
        return sum([use.output_tokens - use.forced_tokens for use in self.uses])

    @property
    def output_tokens(self) -> int:
        return sum(use.output_tokens for use in self.uses)

    @property
    def foreseen_tokens(self) -> tuple[int, int]:
        """Median and 90th percentile of all output: by its end, the engine's forecast, or the prediction."""
        predicted = (self.predicted_output_tokens, self.predicted_high_tokens)
        known = [
            (use.output_tokens,) * 2 if use.outcome is not None else use.foreseen_tokens or predicted
            for use in self.uses
        ]
        return sum(median for median, _ in known), sum(high for _, high in known)

    @property
    def live_sequences(self) -> int:
        return sum(use.outcome is None for use in self.uses)
