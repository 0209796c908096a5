"""Snapshots for pages that are watched: one a tick for all, none unwatched, a bounded number of watchers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gateway.console.live.hub import HubFull, LiveHub
from gateway.console.live.stream import streamed

TICKS = 5


class Counted:
    """Makes numbers."""

    def __init__(self) -> None:
        self.made = 0

    async def make(self) -> int:
        await asyncio.sleep(0)
        self.made += 1
        return self.made


def made_by(registry: CollectorRegistry) -> float | None:
    return registry.get_sample_value("fairgate_console_snapshots_total")


async def test_fifty_watchers_get_the_same_snapshots_and_each_is_made_once() -> None:
    registry, counted = CollectorRegistry(), Counted()
    hub = LiveHub(registry, tick_s=0.0)

    async def watch() -> list[int]:
        seen: list[int] = []
        async with hub.watch("all", counted.make) as topic:
            while len(seen) < TICKS and await topic.after(topic.number if seen else 0):
                seen.append(topic.latest)
        return seen

    seen = await asyncio.gather(*(watch() for _ in range(50)))
    assert all(each == sorted(set(each)) and len(each) == TICKS for each in seen)
    most = max(max(each) for each in seen)
    assert counted.made in (most, most + 1), "one a tick; the last may be made for no one any more"
    assert made_by(registry) == counted.made
    assert hub.watchers == 0
    # Nothing goes on unwatched.
    for _ in range(20):
        await asyncio.sleep(0)
    assert made_by(registry) == counted.made


async def test_pages_opened_together_share_one_snapshot() -> None:
    registry, counted = CollectorRegistry(), Counted()
    hub = LiveHub(registry, tick_s=60.0)
    assert await asyncio.gather(*(hub.look("all", counted.make) for _ in range(50))) == [1] * 50
    assert made_by(registry) == 1
    # Another question has another answer.
    assert await hub.look("one tenant's", counted.make) == 2


async def test_one_more_than_may_watch_is_refused_and_a_place_is_given_back() -> None:
    hub = LiveHub(CollectorRegistry(), tick_s=60.0, most=1)
    async with hub.watch("a", Counted().make):
        assert not hub.has_room
        with pytest.raises(HubFull):
            async with hub.watch("b", Counted().make):
                pass
    assert hub.has_room


async def test_a_gateway_that_stops_ends_all_who_wait_and_takes_no_more() -> None:
    hub = LiveHub(CollectorRegistry(), tick_s=60.0)
    async with hub.watch("a", Counted().make) as topic:
        assert await topic.after(0)
        waiting = asyncio.create_task(topic.after(topic.number))
        await asyncio.sleep(0)
        assert not waiting.done()
        hub.end_streams()
        assert await waiting is False
        with pytest.raises(HubFull):
            async with hub.watch("a", Counted().make):
                pass
    await hub.close()


async def test_a_snapshot_that_fails_ends_no_stream() -> None:
    made: list[bool] = []

    async def make() -> int:
        made.append(True)
        if len(made) == 1:
            raise RuntimeError("a gateway said something strange")
        return len(made)

    hub = LiveHub(CollectorRegistry(), tick_s=0.0)
    async with hub.watch("a", make) as topic:
        assert await topic.after(0)
        assert topic.latest == 2


async def test_a_stream_that_is_not_read_ends_and_gives_its_place_back() -> None:
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            closed.set()

    never = asyncio.Event()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 3:
            await never.wait()

    async def receive() -> Any:
        await never.wait()

    await streamed(events(), unread_s=0.01)({"type": "http"}, receive, send)  # type: ignore[arg-type]
    assert closed.is_set()
    assert [each.get("body") for each in sent[1:]] == [b"data: x\n\n"] * 3
