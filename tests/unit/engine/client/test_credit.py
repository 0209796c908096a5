"""Credit: how far an engine may go ahead of a stream's reader."""

from __future__ import annotations

import pytest

from engine.client.client import CreditedStream
from engine.messages import Delta


class Engine:
    """Emits as far as it was told, and hears or does not."""

    def __init__(self, covered_tokens: int, *, max_buffered_deltas: int = 16) -> None:
        self.told: list[int] = []
        self.hears = True
        self.cut: list[str] = []
        self.emitted = 0
        self.stream = CreditedStream(
            "one", self.give, on_overflow=self.cut.append, received_tokens=0,
            max_buffered_deltas=max_buffered_deltas, covered_tokens=covered_tokens,
        )  # fmt: skip
        self.tell()

    def give(self, stream: CreditedStream) -> None:
        if stream.is_credit_due and self.hears:
            self.tell()

    def tell(self) -> None:
        self.stream.credit_tokens = self.stream.next_credit_tokens
        self.told.append(self.stream.credit_tokens)

    def emit(self) -> None:
        """All that it may, a token at a time."""
        while self.emitted < self.told[-1]:
            assert self.stream.push(Delta("one", self.emitted, [7]))
            self.emitted += 1


async def test_an_engine_is_never_further_ahead_than_the_buffer_has_room() -> None:
    engine = Engine(1_000)
    engine.emit()
    assert (engine.told, engine.stream.buffered_deltas) == ([12], 12)
    for read in range(1, 1_001):
        assert (await anext(engine.stream)).token_ids == [7]
        engine.emit()
        assert engine.emitted <= min(1_000, read + 12)
    assert engine.told[:3] == [12, 18, 24], "half the room at a time"
    assert (engine.told[-1], engine.cut) == (1_000, [])


@pytest.mark.parametrize("covered_tokens", [1, 11, 12])
async def test_what_there_is_room_for_is_told_at_once_and_only_once(covered_tokens: int) -> None:
    engine = Engine(covered_tokens)
    engine.emit()
    for _ in range(covered_tokens):
        await anext(engine.stream)
    assert engine.told == [covered_tokens]


async def test_credit_that_was_not_heard_of_stays_due() -> None:
    engine = Engine(100)
    engine.emit()
    engine.hears = False
    for _ in range(12):
        await anext(engine.stream)
    assert engine.told == [12]
    # Nothing more arrives to be read: another trigger has to send the credit again.
    assert engine.stream.is_credit_due
    engine.hears = True
    engine.give(engine.stream)
    assert engine.told == [12, 24]


async def test_who_is_not_wanted_any_more_gets_no_credit() -> None:
    engine = Engine(100)
    engine.emit()
    engine.stream.is_wanted = False
    for _ in range(12):
        await anext(engine.stream)
    engine.stream.covered_tokens = 500
    assert (engine.told, engine.stream.is_credit_due, engine.stream.next_credit_tokens) == ([12], False, 12)
