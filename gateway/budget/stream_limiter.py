"""How many streams can a tenant's rate feed, and who waits until one of them ends?

A token bucket that flows at 100 tokens a second feeds two streams of 50, however many are asked for. More of
them would only rest in the engine most of the time and hold memory there; so they wait here, first come,
first served for each bucket, before they hold any budget. A request whose limits are no token buckets passes
through.

Each gateway counts its own: with several of them a tenant may have so many times more streams, which then
rest more often. The limit itself is kept by the quota store. That is enough: to share the count would cost a
round trip for every stream, and the counts of a gateway that died would have to be found out and given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.budget.lease import Sizes
from tenants.types import Limit, LimitMode

MAX_WAITING_IN_ALL = 8_192
"""Requests that wait for any bucket at one gateway."""
_MANY_TOKENS = 1_000
"""Sizes are rounded; of so many tokens it does not show."""


class StreamLimitReached(Exception):
    """Too many requests wait already."""

    def __init__(self, most: int) -> None:
        super().__init__(f"{most} requests wait already")
        self.most = most


def fed_streams(limits: Sequence[Limit], sizes: Sizes, stream_tokens_per_s: float) -> dict[str, int]:
    """For every hard token bucket that counts output: how many streams at the engine's pace it can feed, at
    least one; by the bucket's identity."""
    nothing, many = sizes(0), sizes(_MANY_TOKENS)
    fed: dict[str, int] = {}
    for limit in limits:
        if limit.rate_per_s is None or limit.mode is not LimitMode.HARD:
            continue
        size = (many.of(limit.meter) - nothing.of(limit.meter)) / _MANY_TOKENS
        if size > 0:
            fed[limit.identity] = max(1, -int(-limit.rate_per_s // (size * stream_tokens_per_s)))
    return fed


@dataclass(slots=True)
class _WaitingStream:
    needs: Mapping[str, int]
    """How many streams each of its buckets feeds."""
    sequences: int
    may_pass: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class StreamLimiter:
    """Lets as many streams pass as their buckets can feed. Use from one event loop."""

    def __init__(self, *, max_waiting: int, max_waiting_in_all: int = MAX_WAITING_IN_ALL) -> None:
        """`max_waiting`: for one bucket, so that those who wait for a slow one do not turn others away."""
        self._max_waiting = max_waiting
        self._max_waiting_in_all = max_waiting_in_all
        self._waiting: dict[str, _WaitingStream] = {}
        self._passed: dict[str, tuple[Mapping[str, int], int]] = {}
        self._running: dict[str, int] = {}
        """Sequences by bucket."""

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def enter(self, request_id: str, needs: Mapping[str, int], sequences: int) -> asyncio.Future[bool]:
        """Done, perhaps already, when the buckets in `needs` feed `sequences` more; a request with more than
        they ever feed goes alone. Every request that passed, and every one whose wait was cancelled, must
        `leave`. The result: whether it has to be patient, as others are fed by the same bucket, or were when
        it came. Raises `StreamLimitReached`."""
        if not needs:
            return _done(False)
        if not self._waiting and self._feed(needs, sequences):
            self._pass(request_id, needs, sequences)
            return _done(self._is_shared(needs, sequences))
        crowds = [sum(bucket in each.needs for each in self._waiting.values()) for bucket in needs]
        if max(crowds) >= self._max_waiting:
            raise StreamLimitReached(self._max_waiting)
        if len(self._waiting) >= self._max_waiting_in_all:
            raise StreamLimitReached(self._max_waiting_in_all)
        waiting = self._waiting[request_id] = _WaitingStream(needs, sequences)
        self._let_pass()
        return _done(self._is_shared(needs, sequences)) if waiting.may_pass.done() else waiting.may_pass

    def leave(self, request_id: str) -> None:
        """The request is over, or waits no more. Harmless to repeat."""
        self._waiting.pop(request_id, None)
        passed = self._passed.pop(request_id, None)
        if passed is not None:
            needs, sequences = passed
            for bucket in needs:
                self._running[bucket] -= sequences
                if not self._running[bucket]:
                    del self._running[bucket]
        if self._waiting:
            self._let_pass()

    def _let_pass(self) -> None:
        """Nobody overtakes somebody who waits for one of the same buckets."""
        blocked: set[str] = set()
        for request_id, waiting in list(self._waiting.items()):
            if waiting.may_pass.cancelled():
                continue  # it is about to leave
            if blocked.isdisjoint(waiting.needs) and self._feed(waiting.needs, waiting.sequences):
                del self._waiting[request_id]
                self._pass(request_id, waiting.needs, waiting.sequences)
                waiting.may_pass.set_result(True)
            else:
                blocked.update(waiting.needs)

    def _pass(self, request_id: str, needs: Mapping[str, int], sequences: int) -> None:
        self._passed[request_id] = needs, sequences
        for bucket in needs:
            self._running[bucket] = self._running.get(bucket, 0) + sequences

    def _feed(self, needs: Mapping[str, int], sequences: int) -> bool:
        """Whether every one of its buckets feeds it, too."""
        for bucket, most in needs.items():
            running = self._running.get(bucket, 0)
            if running and running + sequences > most:
                return False
        return True

    def _is_shared(self, needs: Mapping[str, int], sequences: int) -> bool:
        """Whether others are fed by one of the buckets of a request that has passed."""
        return any(self._running[bucket] > sequences for bucket in needs)


def _done(result: bool) -> asyncio.Future[bool]:
    future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future
