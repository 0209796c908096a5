"""How does a task wait for the first of a few things, and no longer than it may?

For the path of every request: what `asyncio` has for it costs more than most of these waits last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from types import coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def one_of(*futures: asyncio.Future[Any]) -> None:
    """Returns when one of them is done; which one, they say themselves. `asyncio.wait` without its sets."""
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


async def within(timeout_s: float, work: Awaitable[Result]) -> Result:
    """What `work` returns. Raises `TimeoutError` where that takes longer, and `work` is cancelled then.
    `asyncio.timeout` without a timer for what need not wait at all."""
    steps = work.__await__()
    try:
        waits_for = next(steps)
    except StopIteration as returned:
        result: Result = returned.value
        return result
    async with asyncio.timeout(timeout_s):
        return await _rest(steps, waits_for)


@coroutine
def _rest(steps: Generator[Any, Any, Result], waits_for: Any) -> Generator[Any, Any, Result]:
    """Goes on with what waits already: what it waits for is told to the task as if it did so only now."""
    while True:
        try:
            try:
                answer = yield waits_for
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as error:
                waits_for = steps.throw(error)
            else:
                waits_for = steps.send(answer)
        except StopIteration as returned:
            result: Result = returned.value
            return result
