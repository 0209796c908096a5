"""Cancellation of background tasks that run forever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

ASK_AGAIN_S = 1.0


async def stop(tasks: Iterable[asyncio.Task[Any]], *, ask_again_s: float = ASK_AGAIN_S) -> None:
    """Cancels the tasks and returns when all have ended, ignoring what they raised. Cancels again every
    `ask_again_s`, also in longer clean-ups: `asyncio.wait_for` of Python 3.11, around each redis-py command,
    loses a cancellation that arrives just as its awaitable completes (python/cpython#86296)."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=ask_again_s)
        for task in done:
            if not task.cancelled():
                task.exception()  # retrieved, so that asyncio logs no warning
