"""How does a task that runs for ever end?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

ASK_AGAIN_S = 1.0


async def stop(tasks: Iterable[asyncio.Task[Any]], *, ask_again_s: float = ASK_AGAIN_S) -> None:
    """Cancels them, and returns when all have ended, whatever they raised.

    Asks again where one goes on: `asyncio.wait_for` of Python 3.11 loses a cancellation that comes just as
    what it waits for is done (python/cpython#86296), and redis-py sends each command within one. So it is not
    for a task that needs longer than `ask_again_s` to clear up: that would be cut short.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=ask_again_s)
        for task in done:
            if not task.cancelled():
                task.exception()  # seen: nobody is to be warned of it
