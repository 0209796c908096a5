"""Retries a sequence on another replica before its first token.

Never after the first token, so that nothing is generated or sent twice. On the same replica only if the
connection may have failed: a server may close an idle one at the moment of its use. What may be the request's
fault (an error of the server's, garbage, silence) is tried on one other replica.

The dispatcher's window counts a moved sequence at its first replica: that is rare and short.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from engine.messages import Delta
from gateway.upstream.base import NotBegun, UpstreamFailed, UpstreamUnavailable

MOST_ATTEMPTS = 3
MOST_OF_REQUESTS_OWN = 2
"""Attempts that may fail by the request's own fault."""
SERVERS_OWN = frozenset({"connect", "away", "key"})
"""Failures that no request causes."""
AGAIN = frozenset({"closed", "connect"})
"""Failures after which the same server is worth another try."""


class Candidate(Protocol):
    @property
    def replica_id(self) -> str: ...

    @property
    def is_up(self) -> bool: ...

    @property
    def is_drained(self) -> bool: ...


Replica = TypeVar("Replica", bound=Candidate)


def may_be_requests(error: Exception) -> bool:
    return isinstance(error, UpstreamFailed) and getattr(error, "code", "") not in SERVERS_OWN


def next_replica(
    tried: Sequence[Replica], others: Sequence[Replica], errors: Sequence[Exception]
) -> Replica | None:
    """The next replica; None: the error stands. `tried`: in order; `errors`: of all attempts."""
    if len(tried) >= MOST_ATTEMPTS or sum(map(may_be_requests, errors)) >= MOST_OF_REQUESTS_OWN:
        return None
    error = errors[-1]
    for other in others:
        if other.is_up and not other.is_drained and other not in tried:
            return other
    last = tried[-1]
    is_worth_it = isinstance(error, NotBegun) and error.code in AGAIN
    return last if is_worth_it and last.is_up else None


async def until_begun(
    first: AsyncIterator[Delta],
    again: Callable[[Exception], AsyncIterator[Delta] | None],
    settled: Callable[[Exception], Awaitable[Exception]],
    over: Callable[[], object],
) -> AsyncIterator[Delta]:
    """The deltas of the first attempt that begins. `again` starts another after an error before the first
    token, or returns None to give up; its `UpstreamUnavailable` counts as an attempt. `settled` makes what is
    raised of the last error. `over` is called at the end."""
    deltas = first
    try:
        while True:
            try:
                async for delta in deltas:
                    yield delta
                return
            except (UpstreamFailed, UpstreamUnavailable) as failed:
                error: Exception = failed
            if isinstance(error, UpstreamFailed) and not isinstance(error, NotBegun):
                raise await settled(error)
            while True:
                try:
                    replacement = again(error)
                    break
                except UpstreamUnavailable as unavailable:
                    error = unavailable
            if replacement is None:
                raise await settled(error)
            deltas = replacement
    finally:
        over()
