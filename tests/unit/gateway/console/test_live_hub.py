"""Snapshots for pages that are watched: one a tick for all, none unwatched, a bounded number of watchers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from litestar import Litestar, Request, get
from litestar.types import ASGIApp
from prometheus_client import CollectorRegistry

from gateway.console.live.hub import MOST_OF_PERSON, OWNERS_PART, HubFull, LiveHub, RegionReader
from gateway.console.live.shared_stream import merged
from gateway.console.live.stream import last_event, streamed
from tenants.people.person import Person
from tenants.people.roles import Role

TICKS = 5
OWNER = Person("a", "Ann", Role.OWNER, frozenset(), "active", True, 1, 0)


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

    async def watch(number: int) -> list[int]:
        seen: list[int] = []
        who = replace(OWNER, person_id=str(number))
        async with hub.watch("all", counted.make, who) as topic:
            while len(seen) < TICKS and await topic.after(topic.number if seen else 0):
                seen.append(topic.latest)
        return seen

    seen = await asyncio.gather(*(watch(number) for number in range(50)))
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


async def test_one_person_has_so_many_places_and_owners_have_some_that_no_other_takes() -> None:
    hub = LiveHub(CollectorRegistry(), tick_s=60.0, most=OWNERS_PART + 2 * MOST_OF_PERSON)
    async with AsyncExitStack() as open_pages:

        async def opens(who: Person, pages: int) -> None:
            for _ in range(pages):
                await open_pages.enter_async_context(hub.watch("a", Counted().make, who))

        first, second = (replace(OWNER, person_id=name, role=Role.MEMBER) for name in ("b", "c"))
        await opens(first, MOST_OF_PERSON)
        with pytest.raises(HubFull, match=f"You have {MOST_OF_PERSON} live pages open"):
            await opens(first, 1)
        await opens(second, MOST_OF_PERSON)
        with pytest.raises(HubFull, match="Too many live pages are open"):
            await opens(replace(first, person_id="d"), 1)
        assert not hub.refusal(OWNER)
        await opens(OWNER, MOST_OF_PERSON)
        await opens(replace(OWNER, person_id="e"), OWNERS_PART - MOST_OF_PERSON)
        assert hub.refusal(replace(OWNER, person_id="f"))
    assert not hub.refusal(first)  # a place is given back
    assert hub.watchers == 0


async def test_a_gateway_that_stops_ends_all_who_wait_and_takes_no_more() -> None:
    hub = LiveHub(CollectorRegistry(), tick_s=60.0)
    async with hub.watch("a", Counted().make, OWNER) as topic:
        assert await topic.after(0)
        waiting = asyncio.create_task(topic.after(topic.number))
        await asyncio.sleep(0)
        assert not waiting.done()
        hub.end_streams()
        assert await waiting is False
        with pytest.raises(HubFull):
            async with hub.watch("a", Counted().make, OWNER):
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
    async with hub.watch("a", make, OWNER) as topic:
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


async def test_a_region_that_is_back_soon_goes_on_with_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    hub, first = LiveHub(CollectorRegistry()), RegionReader(lambda *_: "", 0.0)
    async with hub.reading("a", first):
        pass
    monkeypatch.setattr("gateway.console.live.hub.RESUME_S", 0.0)
    async with hub.reading("a", replace(first)) as again, hub.reading("b", replace(first)) as other:
        assert again is first
        assert other is not first
    for _ in range(3):
        await asyncio.sleep(0)
    async with hub.reading("a", replace(first)) as late:
        assert late is not first


async def test_a_shared_stream_outlives_a_region_that_is_over_and_ends_with_one_that_is_lost() -> None:
    over, stopped = asyncio.Event(), last_event("Over.", "/console", "Go on")

    def region(path: str, *, is_over: bool) -> Any:
        async def events() -> AsyncGenerator[bytes, None]:
            if is_over:
                yield stopped
                over.set()
                return
            yield b"data: 1\n\n"
            await over.wait()
            yield b"data: 2\n\n"

        @get(path)
        async def handler() -> ASGIApp:
            return streamed(events())

        return handler

    app = Litestar([region("/a/live", is_over=True), region("/b/live", is_over=False)], openapi_config=None)
    scope: Any = {"type": "http", "method": "GET", "headers": [], "app": app, "litestar_app": app}
    parts = [part async for part in merged(Request(scope), {"a": "/a/live", "b": "/b/live?x=1"})]
    assert sorted(parts) == [b"id: a\n" + stopped, b"id: b\ndata: 1\n\n", b"id: b\ndata: 2\n\n"]
