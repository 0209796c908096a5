"""Is a loop that has work waited for, and one that rests not?"""

from __future__ import annotations

import asyncio

from tenants.storage.loop_idle import IDLE_TURN_S, LoopIdle


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def rests(lull: LoopIdle) -> bool:
    return lull._is_here.is_set()


async def test_who_was_asked_nothing_rests() -> None:
    LoopIdle().wait(60.0)


async def test_a_loop_is_waited_for_until_a_turn_of_it_took_no_time() -> None:
    clock, turns = Clock(), 0
    lull = LoopIdle(clock)

    def work() -> None:
        nonlocal turns
        turns += 1
        clock.now_s += 2 * IDLE_TURN_S
        if turns < 5:
            loop.call_soon(work)

    loop = asyncio.get_running_loop()
    loop.call_soon(work)
    lull.asked(loop)
    while turns < 5:
        assert not rests(lull)
        lull.asked(loop)  # again, as every write does
        await asyncio.sleep(0)
    for _ in range(3):
        await asyncio.sleep(0)
    assert rests(lull)
    lull.asked(loop)
    assert not rests(lull), "it has work again"
    await asyncio.to_thread(lull.wait, 60.0)
    assert rests(lull)


def test_a_loop_that_ended_in_the_middle_is_not_waited_for_once_another_asks() -> None:
    lull = LoopIdle()

    async def ask() -> None:
        lull.asked(asyncio.get_running_loop())

    async def ask_and_rest() -> bool:
        await ask()
        await asyncio.to_thread(lull.wait, 60.0)
        return rests(lull)

    loop = asyncio.new_event_loop()
    loop.call_soon(lull.asked, loop)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    assert not rests(lull)
    assert asyncio.run(ask_and_rest())
