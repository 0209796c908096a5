"""Rules of one sequence's stream: in order, nothing dropped, bounded, and an end that says what it was."""

from __future__ import annotations

import asyncio

import pytest

from engine.client.stream import EngineLost, EngineStream, SlowReader, SubmitRefused
from engine.messages import Delta, SequenceOutcome


def outcome(emitted_tokens: int, finish: str = "stop") -> SequenceOutcome:
    return SequenceOutcome("one", "request", "acme", finish, 5, 0, 5, emitted_tokens)


def stream(max_buffered_deltas: int = 8) -> tuple[EngineStream, list[str]]:
    cut: list[str] = []
    return EngineStream("one", on_overflow=cut.append, max_buffered_deltas=max_buffered_deltas), cut


async def tokens_of(reader: EngineStream) -> list[int]:
    return [token_id async for delta in reader for token_id in delta.token_ids]


async def test_a_reader_gets_every_token_in_order_and_then_the_end() -> None:
    reader, _ = stream()
    assert reader.push(Delta("one", 0, [10, 11]))
    reading = asyncio.ensure_future(tokens_of(reader))
    await asyncio.sleep(0)
    assert reader.push(Delta("one", 2, [12], outcome=outcome(3)))
    assert await reading == [10, 11, 12]
    assert reader.outcome == outcome(3)


async def test_a_token_sent_twice_or_left_out_is_not_taken() -> None:
    reader, _ = stream()
    assert reader.push(Delta("one", 0, [10, 11]))
    assert not reader.push(Delta("one", 1, [11]))
    assert not reader.push(Delta("one", 3, [13]))
    assert reader.push(Delta("one", 2, [12]))
    assert reader.received_tokens == 3


async def test_a_lost_engine_ends_the_stream_after_what_was_received_and_says_how_much_that_was() -> None:
    reader, _ = stream()
    reader.push(Delta("one", 0, [10, 11]))
    reader.lose("the engine died")
    assert (await anext(reader)).token_ids == [10, 11]
    with pytest.raises(EngineLost, match="the engine died") as lost:
        await anext(reader)
    assert lost.value.received_tokens == 2


async def test_a_waiting_reader_is_woken_by_the_end() -> None:
    reader, _ = stream()
    reading = asyncio.ensure_future(tokens_of(reader))
    await asyncio.sleep(0)
    reader.end(SubmitRefused("too_large", "it can never fit"))
    with pytest.raises(SubmitRefused, match="it can never fit"):
        await reading


async def test_a_slow_reader_is_cut_once_and_still_gets_every_token() -> None:
    reader, cut = stream(max_buffered_deltas=3)
    for index in range(6):
        assert reader.push(Delta("one", index, [index]))
    assert cut == ["one"]
    assert reader.push(Delta("one", outcome=outcome(6, "cancelled")))
    received = [token_id for _ in range(7) for token_id in (await anext(reader)).token_ids]
    assert received == [0, 1, 2, 3, 4, 5]
    with pytest.raises(SlowReader) as slow:
        await anext(reader)
    assert slow.value.emitted_tokens == 6


async def test_draining_throws_the_tokens_away_and_returns_the_outcome() -> None:
    reader, cut = stream(max_buffered_deltas=1)
    for index in range(3):
        reader.push(Delta("one", index, [index]))
    assert cut
    reader.push(Delta("one", outcome=outcome(3, "cancelled")))
    assert await reader.drain() == outcome(3, "cancelled")


async def test_the_first_end_counts() -> None:
    reader, _ = stream()
    reader.push(Delta("one", 0, [10], outcome=outcome(1)))
    reader.lose("the engine died")
    assert await tokens_of(reader) == [10]


async def test_a_stream_has_one_reader() -> None:
    reader, _ = stream()
    reading = asyncio.ensure_future(tokens_of(reader))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="reader already"):
        await anext(reader)
    reader.end(None)
    assert await reading == []
