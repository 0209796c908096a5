"""Does a task hear of the first of several things, and leave none of them behind?"""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.waiting import one_of


async def test_the_first_ends_the_wait_and_both_may_come_at_once() -> None:
    loop = asyncio.get_running_loop()
    for ends in ([0], [1], [0, 1]):
        futures: list[asyncio.Future[Any]] = [loop.create_future(), loop.create_future()]
        waiting = asyncio.create_task(one_of(*futures))
        await asyncio.sleep(0)
        assert not waiting.done()
        for index in ends:
            futures[index].set_exception(ValueError())
        await asyncio.wait_for(waiting, 5)
        assert [each.done() for each in futures] == [index in ends for index in (0, 1)]
        for index in ends:
            futures[index].exception()


async def test_what_is_done_is_not_waited_for() -> None:
    loop = asyncio.get_running_loop()
    done, other = loop.create_future(), loop.create_future()
    done.set_result(None)
    waiting = one_of(other, done)
    try:
        waiting.send(None)
    except StopIteration:
        return
    raise AssertionError("it waited")


async def test_who_is_cancelled_leaves_nothing_behind() -> None:
    future = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(one_of(future))
    await asyncio.sleep(0)
    assert len(future._callbacks) == 1  # type: ignore[attr-defined]
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    assert not future._callbacks  # type: ignore[attr-defined]
    assert not future.cancelled()
