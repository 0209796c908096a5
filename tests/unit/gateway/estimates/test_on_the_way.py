"""Requests between their estimate and the queue are counted once, and how long they take is learned."""

from __future__ import annotations

import pytest

from engine.entry import QueueEntry
from gateway.estimates.on_the_way import MAX_ON_THE_WAY, OnTheWay
from gateway.flow.types import Ticket


def ticket(name: str, at_s: float = 0.0, tier: int = 1) -> Ticket:
    return Ticket(QueueEntry(name, "me", at_s, 100, 50, tier), 1, 150)


def test_each_counts_in_its_tier_until_it_is_queued_or_gone() -> None:
    way = OnTheWay()
    for number, tier in enumerate((0, 1, 1, 2)):
        assert way.add(ticket(f"r{number}", tier=tier))
    assert [way.up_to(rank) for rank in range(3)] == [1, 3, 4]
    assert way.queued(ticket("r1", 0.01).entry)
    assert way.remove("r3")
    assert [way.up_to(rank) for rank in range(3)] == [1, 2, 2]
    assert not way.remove("r3")
    assert not way.queued(ticket("r1").entry)
    assert [each.entry.entry_id for each in way.tickets()] == ["r0", "r2"]
    assert way.ticket("r0") is not None
    assert way.ticket("r1") is None
    assert len(way) == 2


def test_what_comes_among_others_is_expected_to_take_as_long_as_such_ones_did() -> None:
    way = OnTheWay()
    for number in range(200):
        first, second = f"a{number}", f"b{number}"
        way.add(ticket(first))
        way.add(ticket(second))
        way.queued(ticket(first, 0.01).entry)
        way.queued(ticket(second, 0.03).entry)
    assert way.expected_s() == pytest.approx(0.01, rel=0.01)
    way.add(ticket("there"))
    assert way.expected_s() == pytest.approx(0.03, rel=0.01)


def test_it_is_bounded() -> None:
    way = OnTheWay()
    assert all(way.add(ticket(f"r{number}")) for number in range(MAX_ON_THE_WAY))
    assert not way.add(ticket("one more"))
    assert len(way) == MAX_ON_THE_WAY
