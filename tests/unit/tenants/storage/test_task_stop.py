"""`stop` ends tasks even where a cancellation was lost."""

from __future__ import annotations

import asyncio

from tenants.storage.task_stop import stop


async def test_a_task_that_lost_one_cancellation_ends_all_the_same() -> None:
    lost = 0

    async def loses_the_first() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                if lost:
                    raise
                lost += 1

    task = asyncio.create_task(loses_the_first())
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await stop([task], ask_again_s=0.001)
    assert task.cancelled()
    assert lost == 1


async def test_a_task_that_failed_or_had_ended_stops_nobody() -> None:
    async def fails() -> None:
        raise ValueError("its own trouble")

    failed = asyncio.create_task(fails())
    await asyncio.wait([failed])
    await stop([failed])
    await stop([])
    assert isinstance(failed.exception(), ValueError)
