"""Events of a running request: when the listener is woken, and their order."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from gateway.requests.run import Begun, Closed, Event, Events, SequenceEnded, SequenceOutput

CLOSED = Closed(cast(Any, None), None)
EVENTS: list[Event] = [
    Begun(),
    SequenceOutput(0, "a", ()),
    SequenceOutput(0, "b", ()),
    SequenceEnded(0, "stop"),
    CLOSED,
]


async def woken_at(events: Events) -> list[Event]:
    """Puts `EVENTS` one by one; returns those after which something was there for the listener."""
    woken: list[Event] = []
    for event in EVENTS:
        before = len(events)
        events.put(event)
        if len(events) > before:
            woken.append(event)
    return woken


async def test_a_stream_hears_of_every_event_at_once() -> None:
    events = Events(10)
    assert await woken_at(events) == EVENTS
    assert events.take() == EVENTS
    assert events.take() == []
    assert events.most_waiting == len(EVENTS)


async def test_who_wants_a_whole_answer_is_woken_once_and_hears_everything() -> None:
    events = Events(1, is_whole=True)
    listening = asyncio.create_task(events.get())
    await asyncio.sleep(0)
    assert await woken_at(events) == [CLOSED]
    assert [await listening, *events.take()] == EVENTS


async def test_a_writer_waits_until_the_listener_has_taken_something() -> None:
    for taken in (Events.get, Events.take):
        events = Events(2)
        await events.wait_for_room()
        events.put(EVENTS[0])
        events.put(EVENTS[1])
        writing = asyncio.create_task(events.wait_for_room())
        await asyncio.sleep(0)
        assert not writing.done()
        found = taken(events)
        if asyncio.iscoroutine(found):
            await found
        await writing


async def test_a_listener_that_was_cut_off_listens_again() -> None:
    events = Events(2)
    listening = asyncio.create_task(events.get())
    await asyncio.sleep(0)
    listening.cancel()
    await asyncio.wait([listening])
    events.put(EVENTS[0])
    assert await events.get() == EVENTS[0]
