"""Cheaper forms of asyncio's waits and timeouts, for the path of every request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from types import coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def one_of(*futures: asyncio.Future[Any]) -> None:
    """Returns when one of `futures` is done; the caller checks which. `asyncio.wait` without its sets."""
    for future in futures:
        if future.done():
            return
    waiter = asyncio.get_running_loop().create_future()

    def wake(_: asyncio.Future[Any]) -> None:
        if not waiter.done():
            waiter.set_result(None)

    for future in futures:
        future.add_done_callback(wake)
    try:
        await waiter
    finally:
        for future in futures:
            future.remove_done_callback(wake)


async def within(timeout_s: float, work: Awaitable[Result]) -> Result:
    """`asyncio.timeout`, with a timer only if `work` waits. Raises `TimeoutError` and cancels `work`."""
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
    """The rest of a coroutine that has already yielded `waits_for`, which the running task awaits next."""
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


# One timer for a whole answer: new data only moves the deadline, which is checked when the timer fires.

LOOK_S = 4.0
"""Longest interval between two checks, so that a nearer deadline rarely needs a new timer."""


class IdleTimeout:
    """A deadline that moves. Use from one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, on_late: Callable[[], None]) -> None:
        self._loop = loop
        self._on_late = on_late
        now_s = loop.time()
        self._deadline_s = now_s + seconds
        self._set(now_s)

    def wait(self, seconds: float) -> None:
        """Moves the deadline to `seconds` from now; replaces the timer only if it would fire too late."""
        now_s = self._loop.time()
        self._deadline_s = now_s + seconds
        if self._deadline_s < self._look_s:
            self._timer.cancel()
            self._set(now_s)

    def end(self) -> None:
        """Drops the callback, too: it would keep both in a cycle until a garbage collection."""
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
