"""Events of a running request: when the listener is woken, and their order."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from engine.messages import TokenLogprob
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
    events = Events(10, most_bytes=10**6)
    assert await woken_at(events) == EVENTS
    assert events.take() == EVENTS
    assert events.take() == []
    assert events.most_waiting == len(EVENTS)


async def test_who_wants_a_whole_answer_is_woken_once_and_hears_everything() -> None:
    events = Events(1, most_bytes=1, is_whole=True)
    listening = asyncio.create_task(events.get())
    await asyncio.sleep(0)
    assert await woken_at(events) == [CLOSED]
    assert [await listening, *events.take()] == EVENTS


async def test_a_writer_waits_until_the_listener_has_taken_something() -> None:
    for taken in (Events.get, Events.take):
        events = Events(2, most_bytes=10**6)
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
    events = Events(2, most_bytes=10**6)
    listening = asyncio.create_task(events.get())
    await asyncio.sleep(0)
    listening.cancel()
    await asyncio.wait([listening])
    events.put(EVENTS[0])
    assert await events.get() == EVENTS[0]


async def test_pieces_wait_only_up_to_so_many_bytes_whatever_their_number() -> None:
    events = Events(1_000, most_bytes=10_000)
    piece = SequenceOutput(0, "", [TokenLogprob(1, "a", -1.0, [(1, "a", -1.0)] * 20)])
    while events.has_room:
        events.put(piece)
    assert 10_000 <= len(events) * piece.num_bytes < 10_000 + piece.num_bytes
    assert piece.num_bytes > 20 * len('{"token":"a","logprob":-1.0,"bytes":[97]}')
    await events.get()
    await events.get()
    assert events.has_room
    events.put(piece)
    events.take()
    for _ in range(2):
        events.put(SequenceOutput(0, "x" * 4_000, ()))
    assert events.has_room, "what was taken no longer counts"
    events.put(SequenceOutput(0, "x" * 4_000, ()))
    assert not events.has_room


async def test_the_room_for_a_whole_answer_is_that_of_the_answer() -> None:
    events = Events(1, most_bytes=1, is_whole=True)
    for _ in range(10):
        events.put(SequenceOutput(0, "x" * 4_000, ()))
    await events.wait_for_room()


async def test_all_sequences_of_a_request_go_on_when_there_is_room() -> None:
    events = Events(1, most_bytes=10**6)
    events.put(EVENTS[0])
    writing = [asyncio.create_task(events.wait_for_room()) for _ in range(3)]
    await asyncio.sleep(0)
    events.take()
    await asyncio.wait_for(asyncio.gather(*writing), 5.0)
