"""How does a task wait for the first of a few things?"""

from __future__ import annotations

import asyncio
from typing import Any


async def one_of(*futures: asyncio.Future[Any]) -> None:
    """Returns when one of them is done; which one, they say themselves.

    `asyncio.wait` for the path of every request: without its sets, which cost more than the wait.
    """
    for each in futures:
        if each.done():
            return
    waiter = asyncio.get_running_loop().create_future()

    def wake(_: asyncio.Future[Any]) -> None:
        if not waiter.done():
            waiter.set_result(None)

    for each in futures:
        each.add_done_callback(wake)
    try:
        await waiter
    finally:
        for each in futures:
            each.remove_done_callback(wake)
