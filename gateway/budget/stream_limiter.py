"""Limits concurrent streams to what a tenant's token buckets can feed.

A bucket that refills at 100 tokens a second feeds two streams of 50. More would mostly be paused in the
engine and hold memory there, so they wait here, FIFO per bucket, before they hold any budget. Counted per
gateway: with several, a tenant may run that many times more streams, paused more often. Sharing the count
would cost a round trip per stream; the quota store enforces the limit itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gateway.budget.lease import Sizes
from tenants.types import Limit, LimitMode, SubjectKind

MAX_WAITING_IN_ALL = 8_192
"""At one gateway, for any bucket."""
_IN_LINE = frozenset({SubjectKind.KEY, SubjectKind.PROJECT, SubjectKind.TENANT})
_MANY_TOKENS = 1_000
"""Sample size for the amount per token, large enough to hide rounding."""


class StreamLimitReached(Exception):
    def __init__(self, most: int) -> None:
        super().__init__(f"{most} requests wait already")
        self.most = most


def fed_streams(
    limits: Sequence[Limit],
    sizes: Sizes,
    stream_tokens_per_s: float,
    rate_of: Callable[[Limit], float] | None = None,
) -> dict[str, int]:
    """Streams at the engine's pace that each hard token bucket on output can feed, at least one, by its
    identity. Not the platform's, where tenants would wait behind each other, nor end users', of whom there
    may be any number. `rate_of`: what a bucket refills at now; None: its rate."""
    nothing, many = sizes(0), sizes(_MANY_TOKENS)
    fed: dict[str, int] = {}
    for limit in limits:
        if limit.rate_per_s is None or limit.mode is not LimitMode.HARD or limit.kind not in _IN_LINE:
            continue
        size = (many.of(limit.meter) - nothing.of(limit.meter)) / _MANY_TOKENS
        if size > 0:
            rate_per_s = limit.rate_per_s if rate_of is None else rate_of(limit)
            fed[limit.identity] = max(1, -int(-rate_per_s // (size * stream_tokens_per_s)))
    return fed


def _future() -> asyncio.Future[bool]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class _WaitingStream:
    needs: Mapping[str, int]
    """Streams that each of its buckets feeds."""
    sequences: int
    may_pass: asyncio.Future[bool]


class StreamLimiter:
    """Use from one event loop."""

    def __init__(
        self,
        *,
        max_waiting: int,
        max_waiting_in_all: int = MAX_WAITING_IN_ALL,
        make_future: Callable[[], asyncio.Future[bool]] = _future,
    ) -> None:
        """`max_waiting`: per bucket, so that waiters for a slow one do not turn others away."""
        self._make_future = make_future
        self._max_waiting = max_waiting
        self._max_waiting_in_all = max_waiting_in_all
        self._waiting: dict[str, _WaitingStream] = {}
        self._passed: dict[str, tuple[Mapping[str, int], int]] = {}
        self._running: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, request_id: str, needs: Mapping[str, int], sequences: int) -> asyncio.Future[bool]:
        """Done once the buckets in `needs` can feed `sequences` more; a request larger than that runs alone.
        The result: whether other streams share its buckets. Every request that passed or was cancelled must
        `leave`. Raises `StreamLimitReached`."""
        if not needs:
            return self._done(False)
        if not self._waiting and self._can_feed(needs, sequences):
            self._pass(request_id, needs, sequences)
            return self._done(self._is_shared(needs, sequences))
        crowds = [sum(bucket in waiter.needs for waiter in self._waiting.values()) for bucket in needs]
        if max(crowds) >= self._max_waiting:
            raise StreamLimitReached(self._max_waiting)
        if len(self._waiting) >= self._max_waiting_in_all:
            raise StreamLimitReached(self._max_waiting_in_all)
        waiting = self._waiting[request_id] = _WaitingStream(needs, sequences, self._make_future())
        self._admit_waiting()
        return self._done(self._is_shared(needs, sequences)) if waiting.may_pass.done() else waiting.may_pass

    def feeds(self, limits: Sequence[Limit]) -> bool:
        return any(limit.identity in self._running for limit in limits)

    def leave(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        passed = self._passed.pop(request_id, None)
        if passed is not None:
            needs, sequences = passed
            for bucket in needs:
                self._running[bucket] -= sequences
                if not self._running[bucket]:
                    del self._running[bucket]
        if self._waiting:
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Admits waiting requests that can pass, FIFO among those that share a bucket."""
        blocked: set[str] = set()
        for request_id, waiting in list(self._waiting.items()):
            if waiting.may_pass.cancelled():
                continue  # about to leave
            if blocked.isdisjoint(waiting.needs) and self._can_feed(waiting.needs, waiting.sequences):
                del self._waiting[request_id]
                self._pass(request_id, waiting.needs, waiting.sequences)
                waiting.may_pass.set_result(True)
            else:
                blocked.update(waiting.needs)

    def _pass(self, request_id: str, needs: Mapping[str, int], sequences: int) -> None:
        self._passed[request_id] = needs, sequences
        for bucket in needs:
            self._running[bucket] = self._running.get(bucket, 0) + sequences

    def _can_feed(self, needs: Mapping[str, int], sequences: int) -> bool:
        for bucket, most in needs.items():
            running = self._running.get(bucket, 0)
            if running and running + sequences > most:
                return False
        return True

    def _is_shared(self, needs: Mapping[str, int], sequences: int) -> bool:
        return any(self._running[bucket] > sequences for bucket in needs)

    def _done(self, result: bool) -> asyncio.Future[bool]:
        future = self._make_future()
        future.set_result(result)
        return future
