"""Threads are shared by tenants in turns, with bounds on what waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from gateway.fair_threads import FairThreads, TooManyWaiting


class Gate:
    """Work that holds its thread until it is opened."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        self.began.set()
        assert self._open.wait(30)

    def open(self) -> None:
        self._open.set()

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.began.wait, 30)


async def queued(threads: FairThreads, number: int) -> None:
    """The tasks have run up to where so much work waits."""
    await asyncio.sleep(0)
    assert len(threads) == number


async def test_tenants_take_turns_however_much_of_one_waits() -> None:
    threads, gate, order = FairThreads(1), Gate(), list[str]()

    def notes(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    holding = asyncio.create_task(threads.run("a", gate))
    await gate.has_begun()
    names = [*(f"a{number}" for number in range(4)), "b0", "b1", "c0"]
    tasks = [asyncio.create_task(threads.run(name[0], notes(name))) for name in names]
    await queued(threads, len(names))
    gate.open()
    await asyncio.gather(holding, *tasks)
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]
    await threads.close()


async def test_one_tenant_never_has_all_threads() -> None:
    threads, gates = FairThreads(3), [Gate() for _ in range(4)]
    flood = [asyncio.create_task(threads.run("a", gate)) for gate in gates]
    await gates[0].has_begun()
    await gates[1].has_begun()
    assert await threads.run("b", lambda: "at once") == "at once"
    assert len(threads) == 2
    assert not gates[2].began.is_set()
    for gate in gates:
        gate.open()
    await asyncio.gather(*flood)
    assert all(gate.began.is_set() for gate in gates)
    await threads.close()


async def test_what_waits_is_bounded_by_tenant_and_in_all() -> None:
    threads, gate = FairThreads(1, max_waiting=3, max_waiting_per_tenant=2), Gate()
    tasks = [asyncio.create_task(threads.run("a", gate))]
    await gate.has_begun()
    tasks += [asyncio.create_task(threads.run("a", lambda: None)) for _ in range(2)]
    await queued(threads, 2)
    with pytest.raises(TooManyWaiting) as refused:
        await threads.run("a", lambda: None)
    assert (refused.value.most, refused.value.of_tenant) == (2, True)
    tasks.append(asyncio.create_task(threads.run("b", lambda: None)))
    await queued(threads, 3)
    with pytest.raises(TooManyWaiting) as refused:
        await threads.run("c", lambda: None)
    assert (refused.value.most, refused.value.of_tenant) == (3, False)
    gate.open()
    await asyncio.gather(*tasks)
    assert await threads.run("c", lambda: 7) == 7
    await threads.close()


async def test_work_that_is_cancelled_while_it_waits_never_runs_and_frees_its_place() -> None:
    threads, gate, ran = FairThreads(1, max_waiting_per_tenant=1), Gate(), list[str]()
    holding = asyncio.create_task(threads.run("a", gate))
    await gate.has_begun()
    left = asyncio.create_task(threads.run("b", lambda: ran.append("left")))
    await queued(threads, 1)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    stays = asyncio.create_task(threads.run("b", lambda: ran.append("stays")))
    await queued(threads, 1)
    gate.open()
    await asyncio.gather(holding, stays)
    assert ran == ["stays"]
    await threads.close()


async def test_a_running_thread_whose_work_was_cancelled_is_free_only_when_it_ends() -> None:
    threads, gate = FairThreads(1), Gate()
    left = asyncio.create_task(threads.run("a", gate))
    await gate.has_begun()
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    next_one = asyncio.create_task(threads.run("b", lambda: "ran"))
    await queued(threads, 1)
    gate.open()
    assert await next_one == "ran"
    await threads.close()


async def test_an_exception_reaches_the_caller_and_frees_the_thread() -> None:
    threads = FairThreads(1)
    with pytest.raises(ZeroDivisionError):
        await threads.run("a", lambda: 1 // 0)
    assert await threads.run("a", lambda: 1) == 1
    await threads.close()
