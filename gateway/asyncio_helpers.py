"""How does a task wait for the first of a few things, and no longer than it may?

For the path of every request: what `asyncio` has for it costs more than most of these waits last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
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


# Has nothing come for too long?
#
# One timer for a whole answer: what comes only moves the deadline, which is looked at when the timer fires.

LOOK_S = 4.0
"""The timer looks at the deadline at least so often: one that comes nearer seldom needs another timer."""


class IdleTimeout:
    """A deadline that moves. Use from one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, on_late: Callable[[], None]) -> None:
        """`on_late` is called once, when the deadline has passed."""
        self._loop = loop
        self._on_late = on_late
        now_s = loop.time()
        self._deadline_s = now_s + seconds
        self._set(now_s)

    def wait(self, seconds: float) -> None:
        """From now on so long. Where that is earlier than the next look, the timer is set anew."""
        now_s = self._loop.time()
        self._deadline_s = now_s + seconds
        if self._deadline_s < self._look_s:
            self._timer.cancel()
            self._set(now_s)

    def end(self) -> None:
        """Nothing is waited for any more. Who is called is let go of: it holds this, and the two would keep
        one another, and all that they hold, until the collector of cycles comes by."""
        self._timer.cancel()
        self._on_late = _nothing

    def _set(self, now_s: float) -> None:
        self._look_s = min(self._deadline_s, now_s + LOOK_S)
        self._timer = self._loop.call_at(self._look_s, self._look)

    def _look(self) -> None:
        now_s = self._loop.time()
        if now_s < self._deadline_s:
            self._set(now_s)
        else:
            on_late = self._on_late
            self.end()
            on_late()


def _nothing() -> None:
    pass
