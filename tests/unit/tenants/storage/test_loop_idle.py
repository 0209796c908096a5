"""LoopIdle waits for a busy event loop and returns when it is idle."""

from __future__ import annotations

import asyncio

from tenants.storage.loop_idle import IDLE_TURN_S, LoopIdle


class Clock:
    """A clock set by the test."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def is_idle(loop_idle: LoopIdle) -> bool:
    return loop_idle._idle.is_set()


async def test_without_a_watched_loop_it_is_idle() -> None:
    LoopIdle().wait(60.0)


async def test_a_loop_is_busy_until_an_iteration_takes_no_time() -> None:
    clock, turns = Clock(), 0
    loop_idle = LoopIdle(clock)

    def work() -> None:
        nonlocal turns
        turns += 1
        clock.now_s += 2 * IDLE_TURN_S
        if turns < 5:
            loop.call_soon(work)

    loop = asyncio.get_running_loop()
    loop.call_soon(work)
    loop_idle.watch(loop)
    while turns < 5:
        assert not is_idle(loop_idle)
        loop_idle.watch(loop)  # again, as every write does
        await asyncio.sleep(0)
    for _ in range(3):
        await asyncio.sleep(0)
    assert is_idle(loop_idle)
    loop_idle.watch(loop)
    assert not is_idle(loop_idle), "it has work again"
    await asyncio.to_thread(loop_idle.wait, 60.0)
    assert is_idle(loop_idle)


def test_a_loop_that_stopped_is_forgotten_once_another_is_watched() -> None:
    loop_idle = LoopIdle()

    async def ask() -> None:
        loop_idle.watch(asyncio.get_running_loop())

    async def ask_and_rest() -> bool:
        await ask()
        await asyncio.to_thread(loop_idle.wait, 60.0)
        return is_idle(loop_idle)

    loop = asyncio.new_event_loop()
    loop.call_soon(loop_idle.watch, loop)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    assert not is_idle(loop_idle)
    assert asyncio.run(ask_and_rest())
