"""What is known of a request under way, and what may its listener hear?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.messages import TokenLogprob
from gateway.account.charge import SequenceUse
from gateway.account.estimate import Account, Estimate, Times
from gateway.account.outcomes import RequestOutcome
from gateway.dispatcher import Turn
from gateway.errors import ApiError
from gateway.topping import Leases
from gateway.understand import Call
from tenants.pricing import PriceBook
from tenants.quota.store import LimitState
from tenants.types import NOTHING, Amounts


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


class Events(asyncio.Queue[Event]):
    """What the listener has not taken yet. Only pieces of text wait for room in it: everything else is at
    most a few events a request, and must get through."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self._taken = asyncio.Event()

    async def wait_for_room(self) -> None:
        """Returns when the listener has left room for another piece."""
        while self.qsize() >= self.most:
            self._taken.clear()
            await self._taken.wait()

    def _get(self) -> Event:
        # The hook that asyncio.Queue has for what happens when an item is taken.
        event: Event = super()._get()
        self._taken.set()
        return event


@dataclass(eq=False)
class Run:
    """One request under way: what its task knows, and what its listener may read."""

    call: Call
    times: Times
    uses: list[SequenceUse]
    prices: PriceBook
    """As they were when it came: it is held and charged by these, whatever is set meanwhile."""
    events: Events
    leases: Leases | None = None
    """What it holds, once it holds something."""
    estimate: Estimate | None = None
    limit_states: tuple[LimitState, ...] = ()
    turn: Turn | None = None
    has_begun: bool = False
    predicted_output_tokens: int = 1
    """Of each sequence, the median."""
    predicted_high_tokens: int = 1
    """Of each sequence, the 90th percentile."""
    predicted_tokens_to_hold: int = 1
    """Of each sequence, the quantile that is reserved."""
    stop_cause: str | None = None
    interrupted: asyncio.Future[RequestOutcome] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def interrupt(self, outcome: RequestOutcome) -> None:
        """No more tokens are wanted. The first reason counts."""
        if not self.interrupted.done():
            self.interrupted.set_result(outcome)

    def begin(self) -> None:
        """The first token of any sequence is here."""
        if not self.has_begun:
            self.has_begun = True
            self.events.put_nowait(Begun())

    async def has_room(self, timeout_s: float) -> bool:
        """Waits until the listener has room for more. False: it is too slow, or nobody listens any more."""
        if self.interrupted.done():
            return False
        if self.events.qsize() < self.events.most:
            return True
        waiting = asyncio.create_task(self.events.wait_for_room())
        racing: set[asyncio.Future[Any]] = {waiting, self.interrupted}
        await asyncio.wait(racing, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return not self.interrupted.done()
        waiting.cancel()
        self.interrupt(RequestOutcome.SLOW_READER)
        return False

    @property
    def held(self) -> Amounts:
        """Everything held so far, in tokens as they are billed."""
        if self.leases is None:
            return NOTHING
        return replace(
            self.leases.covered,
            input_tokens=self.call.input_tokens,
            output_tokens=self.leases.covered_output_tokens,
        )

    @property
    def output_tokens(self) -> int:
        """Emitted so far, all sequences together."""
        return sum(use.output_tokens for use in self.uses)

    @property
    def live_sequences(self) -> int:
        """Sequences without an outcome."""
        return sum(use.outcome is None for use in self.uses)
