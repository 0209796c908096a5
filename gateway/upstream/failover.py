"""Retries of a sequence on another replica before its first token.

On another one, where there is one, a few times and never after the first token: what a client has seen is not
repeated, and what was generated is not generated twice. On the same one only where its failure may have been
the connection's: a server may close an idle connection at the moment of its use.

The dispatcher's window counts a moved sequence where it was sent first: that is rare and short.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, TypeVar

from engine.messages import Delta
from gateway.upstream.base import NotBegun, UpstreamUnavailable

MOST_ATTEMPTS = 3
AGAIN = frozenset({"closed", "connect"})
"""Failures after which the same server is worth another try."""


class Candidate(Protocol):
    """What the choice needs to know of a replica."""

    @property
    def replica_id(self) -> str: ...

    @property
    def is_up(self) -> bool: ...

    @property
    def is_drained(self) -> bool: ...


Replica = TypeVar("Replica", bound=Candidate)


def next_replica(tried: Sequence[Replica], others: Sequence[Replica], error: Exception) -> Replica | None:
    """The replica for the next attempt; None: the error stands. `tried`: the failed ones, the last one
    last."""
    if len(tried) >= MOST_ATTEMPTS:
        return None
    for other in others:
        if other.is_up and not other.is_drained and other not in tried:
            return other
    last = tried[-1]
    is_worth_it = isinstance(error, NotBegun) and error.code in AGAIN
    return last if is_worth_it and last.is_up else None


async def until_begun(
    first: AsyncIterator[Delta],
    again: Callable[[Exception], AsyncIterator[Delta] | None],
    over: Callable[[], object],
) -> AsyncIterator[Delta]:
    """The deltas of the first attempt that begins. `again` starts another one after an error, or returns None
    to give up; its `UpstreamUnavailable` counts as one more attempt. `over` is called at the end."""
    deltas = first
    try:
        while True:
            try:
                async for delta in deltas:
                    yield delta
                return
            except (NotBegun, UpstreamUnavailable) as failed:
                error: Exception = failed
            while True:
                try:
                    found = again(error)
                    break
                except UpstreamUnavailable as unavailable:
                    error = unavailable
            if found is None:
                raise error
            deltas = found
    finally:
        over()
