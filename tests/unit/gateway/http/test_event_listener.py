"""Keep-alives of a silent stream, and no more than needed."""

from __future__ import annotations

import asyncio

from gateway.domain.estimate import Times
from gateway.domain.usage import SequenceUse
from gateway.http.event_listener import EventListener
from gateway.requests.dialects.chat import ChunkWriter
from gateway.requests.run import Begun, Events, InLine, Run, SequenceOutput, Silence
from tenants.outcomes import RequestOutcome
from tenants.pricing.pricing import Price, uniform_book
from tests.support.builders import call
from tests.support.freed import no_cycles_left

CALL = call()
AWHILE_S = 0.02


def run() -> Run:
    return Run(
        CALL, Times(0.0), [SequenceUse(1)], uniform_book({"m": Price(1, 1, 1)}), Events(8, most_bytes=10**6)
    )


async def test_a_silence_is_heard_again_and_again_until_something_comes() -> None:
    running = run()
    listener = EventListener(running)
    listener.note_silence(AWHILE_S)
    assert [await listener.next() for _ in range(3)] == [Silence()] * 3
    running.events.put(Begun())
    assert await listener.next() == Begun()
    listener.end()


async def test_what_comes_in_time_moves_the_next_silence() -> None:
    running = run()
    listener = EventListener(running)
    clock = asyncio.get_running_loop().time
    long_s = 0.5  # a stall of the machine is shorter
    listener.note_silence(long_s)
    await asyncio.sleep(AWHILE_S)  # the subject, not a wait
    running.events.put(InLine())
    assert await listener.next() == InLine()
    assert listener.available() == []
    since_s = clock()
    listener.note_silence(long_s)
    assert await listener.next() == Silence()
    assert clock() - since_s >= long_s
    listener.end()


async def test_a_client_that_does_not_read_finds_no_silences_afterwards() -> None:
    running = run()
    listener = EventListener(running)
    listener.note_silence(AWHILE_S)
    piece = SequenceOutput(0, "a", ())
    running.events.put(piece)
    await asyncio.sleep(AWHILE_S * 4)  # it is busy writing
    assert [await listener.next(), *listener.available()] == [piece]
    listener.end()


async def test_no_silence_is_reported_after_the_end() -> None:
    running = run()
    listener = EventListener(running)
    listener.note_silence(AWHILE_S)
    listener.end()
    await asyncio.sleep(AWHILE_S * 3)
    assert not len(running.events)
    running.interrupt(RequestOutcome.DISCONNECTED)


def test_a_silence_is_a_comment() -> None:
    assert ChunkWriter(CALL).write(Silence()) == b": keep-alive\n\n"


async def test_a_listener_that_heard_all_is_freed_at_once() -> None:
    with no_cycles_left():
        running = run()
        listener = EventListener(running)
        listener.note_silence(AWHILE_S)
        assert await listener.next() == Silence()
        listener.end()
        del running, listener
