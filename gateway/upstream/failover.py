"""Decides which replica a sequence is sent to that was not begun. Pure.

The same one again only if the connection may have failed: a server may close an idle one at the moment of its
use. What may be the request's fault (an error of the server's, garbage, silence) is tried on one other
replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from gateway.upstream.base import NotBegun, Upstream, UpstreamFailed

MOST_ATTEMPTS = 3
MOST_OF_REQUESTS_OWN = 2
"""Attempts that may fail by the request's own fault."""
SERVERS_OWN = frozenset({"connect", "away", "key"})
"""Failures that no request causes."""
AGAIN = frozenset({"closed", "connect"})
"""Failures after which the same server is worth another try."""


AnyReplica = TypeVar("AnyReplica", bound=Upstream)


def may_be_requests(error: Exception) -> bool:
    return isinstance(error, UpstreamFailed) and getattr(error, "code", "") not in SERVERS_OWN


def next_replica(
    tried: Sequence[AnyReplica], others: Sequence[AnyReplica], errors: Sequence[Exception]
) -> AnyReplica | None:
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
