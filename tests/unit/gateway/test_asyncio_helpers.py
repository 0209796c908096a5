"""Waits for the first of several futures, and timeouts: results, cancellation, no leftovers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.asyncio_helpers import one_of, within
from tests.support.freed import no_cycles_left


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


class Work:
    """Waits for one thing after the other, and notes the results."""

    def __init__(self, *waits: asyncio.Future[str] | float) -> None:
        self.waits = waits
        self.got: list[str] = []

    async def do(self, *, catches: bool = False) -> str:
        for each in self.waits:
            try:
                self.got.append(await each if isinstance(each, asyncio.Future) else await later(each))
            except asyncio.CancelledError:
                self.got.append("cancelled")
                if not catches:
                    raise
        return "-".join(self.got)


async def later(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return f"{seconds:g}"


async def test_what_waits_for_nothing_needs_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    def timeout(seconds: float) -> Any:
        raise AssertionError(f"a timer of {seconds} s")

    monkeypatch.setattr("gateway.asyncio_helpers.asyncio.timeout", timeout)
    done = asyncio.get_running_loop().create_future()
    done.set_result("there")
    assert await within(0.0, Work(done).do()) == "there"
    assert await within(0.0, done) == "there"


async def test_what_waits_goes_on_as_if_it_were_awaited() -> None:
    coming = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(coming.set_result, "came")
    work = Work(0.0, coming, 0.001, 0.0)
    assert await within(60.0, work.do()) == "0-came-0.001-0"


async def test_an_error_of_the_work_is_the_callers_at_once_and_later() -> None:
    failing = asyncio.get_running_loop().create_future()
    failing.set_exception(KeyError("x"))
    with pytest.raises(KeyError):
        await within(60.0, Work(failing).do())
    late = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(late.set_exception, KeyError("y"))
    with pytest.raises(KeyError):
        await within(60.0, Work(late).do())


async def test_what_takes_too_long_is_cancelled_where_it_waits() -> None:
    never = asyncio.get_running_loop().create_future()
    work = Work(0.0, never)
    with pytest.raises(TimeoutError):
        await within(0.01, work.do())
    assert work.got == ["0", "cancelled"]
    assert never.cancelled()
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_who_cancels_the_task_is_not_told_of_a_timeout() -> None:
    work = Work(asyncio.get_running_loop().create_future(), 0.0)
    task = asyncio.create_task(within(60.0, work.do(catches=True)))
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "cancelled-0", "the work heard of it, and went on as it may"
    again = Work(asyncio.get_running_loop().create_future())
    task = asyncio.create_task(within(60.0, again.do()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert again.got == ["cancelled"]


async def test_who_is_thrown_away_closes_the_work() -> None:
    closed: list[str] = []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            closed.append("closed")

    waiting = within(60.0, work())
    waiting.send(None)
    waiting.close()
    assert closed == ["closed"]


async def test_nothing_of_a_wait_stays_in_memory() -> None:
    with no_cycles_left():
        assert await within(60.0, Work(0.0, 0.0).do()) == "0-0"
