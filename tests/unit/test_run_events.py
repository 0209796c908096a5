"""When is a listener woken, and does it hear everything in its order?"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from gateway.run import Begun, Closed, Ended, Event, Events, Piece

CLOSED = Closed(cast(Any, None), None)
EVENTS: list[Event] = [Begun(), Piece(0, "a", ()), Piece(0, "b", ()), Ended(0, "stop"), CLOSED]


async def woken_at(events: Events) -> list[Event]:
    """Puts `EVENTS` one by one; returns those after which something was there for the listener."""
    woken: list[Event] = []
    for event in EVENTS:
        before = events.qsize()
        events.put_nowait(event)
        if events.qsize() > before:
            woken.append(event)
    return woken


async def test_a_stream_hears_of_every_event_at_once() -> None:
    events = Events(10)
    assert await woken_at(events) == EVENTS
    assert [events.get_nowait() for _ in EVENTS] == EVENTS


async def test_who_wants_a_whole_answer_is_woken_once_and_hears_everything() -> None:
    events = Events(1, is_whole=True)
    listening = asyncio.create_task(events.get())
    assert await woken_at(events) == [CLOSED]
    assert [await listening, *(events.get_nowait() for _ in EVENTS[1:])] == EVENTS
