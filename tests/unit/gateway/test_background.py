"""Services in order, periodic work and background writers: failures, outages, purges, the last flush."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

import pytest

from gateway.background import BackgroundWriter, GatewayService, Services, every, watch_lag
from tenants.errors import DatabaseUnavailable
from tenants.storage.task_stop import stop

log = logging.getLogger("test.background")


async def test_work_goes_on_after_every_failure(caplog: pytest.LogCaptureFixture) -> None:
    ends = [ValueError(), None, ValueError(), None]
    done = asyncio.Event()

    async def work() -> None:
        end = ends.pop(0) if ends else None
        if not ends:
            done.set()
        if end is not None:
            raise end

    task = asyncio.create_task(every(0.001, work, log, "it failed"))
    await asyncio.wait_for(done.wait(), 5)
    await stop([task])
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [("ERROR", "it failed")] * 2


async def test_the_first_call_is_now_or_after_one_interval() -> None:
    calls: list[str] = []
    tasks = [
        asyncio.create_task(every(60, lambda: calls.append("later"), log, "-")),
        asyncio.create_task(every(60, lambda: calls.append("now"), log, "-", starts_now=True)),
    ]
    await asyncio.sleep(0.01)
    await stop(tasks)
    assert calls == ["now"]


async def test_what_holds_the_loop_is_seen_as_lag() -> None:
    seen, told = list[float](), asyncio.Event()

    def note(lag_s: float) -> None:
        seen.append(lag_s)
        told.set()

    task = asyncio.create_task(watch_lag(0.01, note))
    await told.wait()
    time.sleep(0.2)  # noqa: ASYNC251 (what no callback may do)
    told.clear()
    await asyncio.wait_for(told.wait(), 5)
    await stop([task])
    assert min(seen) >= 0
    assert max(seen) >= 0.15


class Writer(BackgroundWriter):
    task_name = "writer"
    log = log
    failed = "it failed"
    unavailable = "it waits"

    def __init__(self, purge_every_s: float) -> None:
        self.purge_every_s = purge_every_s
        self.flushed = asyncio.Event()
        self.flushes = self.purges = 0
        self.purge_ends: list[Exception] = [ValueError(), DatabaseUnavailable("gone")]

    async def flush(self) -> None:
        self.flushes += 1
        if self.flushes == 5:
            self.flushed.set()

    async def purge(self) -> None:
        if self.purge_ends:
            raise self.purge_ends.pop(0)
        self.purges += 1


async def test_a_writer_purges_rarely_and_flushes_once_more_when_it_closes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Writer, "flush_every_s", 0.001)
    for purge_every_s in (0.0, 60.0):
        writer = Writer(purge_every_s)
        writer.start()
        await asyncio.wait_for(writer.flushed.wait(), 5)
        flushes = writer.flushes
        await writer.close()
        assert writer.flushes in (flushes + 1, flushes + 2)
        assert [each.getMessage() for each in caplog.records] == [
            "it failed",
            "it waits: DatabaseUnavailable",
        ]
        caplog.clear()
        assert writer.purges >= 2 if purge_every_s == 0 else writer.purges == 1, "a failed purge is repeated"


async def test_a_writer_that_never_started_flushes_when_it_closes() -> None:
    writer = Writer(0.0)
    await writer.close()
    assert writer.flushes == 1


async def waiting(said: list[str]) -> None:
    said.append("task")
    try:
        await asyncio.Event().wait()
    finally:
        said.append("task ends")


async def test_services_stop_in_reverse_order_each_task_before_its_own_stop_whatever_fails() -> None:
    said: list[str] = []

    async def begin() -> None:
        said.append("start two")
        await asyncio.sleep(0)

    def fail() -> None:
        said.append("stop three")
        raise ValueError("it does not stop")

    services = Services(
        GatewayService("one", lambda: said.append("start one"), lambda: said.append("stop one")),
        GatewayService("two", begin, lambda: said.append("stop two"), partial(waiting, said)),
        GatewayService("three", stop=fail),
    )
    await services.start()
    await asyncio.sleep(0)
    assert said == ["start one", "start two", "task"]
    del said[:]
    with pytest.raises(ValueError, match="it does not stop"):
        await services.stop()
    assert said == ["stop three", "task ends", "stop two", "stop one"]


async def test_where_a_service_does_not_start_those_before_it_are_stopped_and_none_after_it_starts() -> None:
    said: list[str] = []

    def fail() -> None:
        raise DatabaseUnavailable("gone")

    services = Services(
        GatewayService("one", stop=lambda: said.append("stop one"), task=partial(waiting, said)),
        GatewayService("two", fail, lambda: said.append("stop two")),
        GatewayService("three", lambda: said.append("start three")),
    )
    with pytest.raises(DatabaseUnavailable):
        await services.start()
    assert said == ["stop one"]
    await services.stop()
    assert said == ["stop one"], "once"
