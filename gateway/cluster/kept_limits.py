"""The limits that are kept in memory, of all workers of one port: what their supervisor answers by."""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.budget.free_calls import QUOTES, TOKEN_CALLS, FreeCalls
from gateway.config import GatewayConfig
from tenants.people.throttle import BEGIN, NOT_JUDGED, SUCCEEDED, LogInThrottle


def kept_limits(
    config: GatewayConfig, clock: Callable[[], float] = time.monotonic
) -> dict[str, Callable[..., float | None]]:
    """By the names that workers ask for (`gateway/workers/keeper.py`)."""
    throttle = LogInThrottle()
    return {
        BEGIN: lambda name, address: throttle.begin(name, address, clock()),
        SUCCEEDED: throttle.succeeded,
        NOT_JUDGED: throttle.not_judged,
        QUOTES: FreeCalls(QUOTES, config.quotes_per_s, clock).wait_s,
        TOKEN_CALLS: FreeCalls(TOKEN_CALLS, config.token_calls_per_s, clock).wait_s,
    }
