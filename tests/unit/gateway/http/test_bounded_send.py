"""Write timeout: only a client that does not read is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gateway.http.asgi import BoundedSend
from tests.support.freed import no_cycles_left

Send = Callable[[object], Awaitable[None]]


class Client:
    """Reads at once, or while not `is_reading` when `reads` is set."""

    def __init__(self, *, is_reading: bool = True) -> None:
        self.is_reading = is_reading
        self.reads = asyncio.Event()
        self.got: list[object] = []

    async def send(self, message: object) -> None:
        if not self.is_reading:
            await self.reads.wait()
            self.reads.clear()
        self.got.append(message)


async def test_what_is_read_at_once_passes() -> None:
    client = Client()
    bounded = BoundedSend(client.send, 0.02)
    await bounded("one")
    await bounded.json(200, b"{}", [(b"a", b"b")])
    assert len(client.got) == 3
    start = client.got[1]
    assert isinstance(start, dict)
    assert (b"a", b"b") in start["headers"]


async def test_a_write_that_is_not_read_is_given_up() -> None:
    client = Client()
    bounded = BoundedSend(client.send, 0.02)
    await bounded("one")
    client.is_reading = False
    with pytest.raises(TimeoutError):
        await bounded("two")
    assert client.got == ["one"]
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_each_write_has_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    real_time_s, passed_s = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: real_time_s() + passed_s)
    client = Client(is_reading=False)
    bounded = BoundedSend(client.send, 1000.0)
    for number in range(3):
        write = asyncio.create_task(bounded(number))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        passed_s += 600.0
        # The loop looks at its timers with the new time.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        client.reads.set()
        await write
    assert client.got == [0, 1, 2]


async def test_time_in_which_nothing_is_written_does_not_count() -> None:
    client = Client()
    bounded = BoundedSend(client.send, 0.01)
    await bounded("one")
    await asyncio.sleep(0.03)  # the subject, not a wait
    await bounded("two")
    client.is_reading = False
    with pytest.raises(TimeoutError):
        await bounded("three")
    assert client.got == ["one", "two"]


async def test_who_cancels_the_task_is_not_told_of_a_timeout() -> None:
    bounded = BoundedSend(Client(is_reading=False).send, 60.0)
    task = asyncio.create_task(bounded("one"))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_answer_that_was_written_is_freed_at_once() -> None:
    with no_cycles_left():
        bounded = BoundedSend(Client().send, 60.0)
        await bounded("one")
        del bounded
