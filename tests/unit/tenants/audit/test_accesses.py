"""Accesses are merged by minute, address and name, reads by hour, and a flood is bounded and counted."""

from __future__ import annotations

import pytest

from tenants.audit.accesses import (
    DROP,
    HOUR_US,
    MINUTE_US,
    MOST_OF_A_KIND,
    MOST_READS,
    OTHERS,
    READ,
    SEVERAL,
    Access,
    AccessBuffer,
    MergedAccess,
)

START_US = 1_700_000_040_000_000
"""The begin of a minute, not of an hour."""


def refused(name: str = "ada", origin: str = "192.0.2.1", why: str = "password") -> Access:
    return Access("session.refuse", f"person:{name}", origin, why=why)


def told(rows: object) -> list[tuple[str, str, int]]:
    assert isinstance(rows, list)
    return [(row.access.actor, row.access.origin, row.count) for row in rows]


def test_a_flood_of_one_name_from_one_address_is_one_row_a_minute_with_its_count() -> None:
    buffer = AccessBuffer()
    for number in range(1_000):
        buffer.note(refused(why="password" if number < 5 else "slowed"), START_US + number)
    buffer.note(refused(), START_US + MINUTE_US)
    assert buffer.take(START_US + MINUTE_US - 1, 10) == []
    [row] = buffer.take(START_US + MINUTE_US, 10)
    assert (row.count, row.reasons) == (1_000, {"password": 5, "slowed": 995})
    assert (row.first_us, row.last_us) == (START_US, START_US + 999)
    [second] = buffer.take(START_US + 2 * MINUTE_US, 10)
    assert second.count == 1
    assert len(buffer) == 0


def test_names_addresses_and_outcomes_are_told_apart() -> None:
    buffer = AccessBuffer()
    for access in (
        refused(),
        refused("bob"),
        refused(origin="192.0.2.2"),
        Access("session.open", "person:ada", "192.0.2.1"),
        refused(),
    ):
        buffer.note(access, START_US)
    assert sorted(told(buffer.take(START_US + MINUTE_US, 10))) == [
        ("person:ada", "192.0.2.1", 1),
        ("person:ada", "192.0.2.1", 2),
        ("person:ada", "192.0.2.2", 1),
        ("person:bob", "192.0.2.1", 1),
    ]


@pytest.mark.parametrize("by", ["name", "address"])
def test_beyond_a_hundred_names_or_addresses_in_a_minute_the_rest_are_one_row(by: str) -> None:
    buffer = AccessBuffer()
    for number in range(10_000):
        address = f"10.0.{number // 256}.{number % 256}"
        buffer.note(refused(f"n{number}") if by == "name" else refused(origin=address), START_US)
    buffer.note(refused("n5") if by == "name" else refused(origin="10.0.0.5"), START_US)
    rows = told(buffer.take(START_US + MINUTE_US, 1_000))
    assert len(rows) == MOST_OF_A_KIND + 1
    assert rows[-1] == (OTHERS, OTHERS, 10_000 - MOST_OF_A_KIND)
    assert rows[5][2] == 2, "a name that has its row goes on to be counted there"
    assert sum(count for *_, count in rows) == 10_001


def test_a_flood_of_one_kind_leaves_rows_for_others() -> None:
    buffer = AccessBuffer()
    for number in range(500):
        buffer.note(Access("access.refuse", "unknown", f"10.0.0.{number}"), START_US)
    buffer.note(Access("access.refuse", "key:fg_live_1", "192.0.2.9"), START_US)
    buffer.note(Access("session.open", "person:ada", "192.0.2.9"), START_US)
    rows = told(buffer.take(START_US + MINUTE_US, 1_000))
    assert ("key:fg_live_1", "192.0.2.9", 1) in rows
    assert ("person:ada", "192.0.2.9", 1) in rows


def test_reads_are_one_row_an_hour_for_key_and_route() -> None:
    buffer = AccessBuffer()
    begin = START_US - START_US % HOUR_US
    for minute in range(60):
        origin = "192.0.2.1" if minute < 59 else "192.0.2.2"
        buffer.note(Access(READ, "key:a", origin, "GET /admin/v1/keys"), begin + minute * MINUTE_US)
    buffer.note(Access(READ, "key:a", "192.0.2.1", "GET /admin/v1/audit"), begin)
    assert buffer.take(begin + HOUR_US - 1, 10) == []
    rows = buffer.take(begin + HOUR_US, 10)
    assert [(row.access.target, row.access.origin, row.count) for row in rows] == [
        ("GET /admin/v1/keys", SEVERAL, 60),
        ("GET /admin/v1/audit", "192.0.2.1", 1),
    ]
    for number in range(MOST_READS + 7):
        buffer.note(Access(READ, f"key:{number}", "192.0.2.1", "GET /admin/v1/keys"), begin + HOUR_US)
    assert len(buffer) == MOST_READS + 1


def test_what_waits_is_bounded_and_what_is_lost_is_counted_in_a_row() -> None:
    buffer = AccessBuffer(most_waiting=3)
    for minute in range(10):  # the database is away
        buffer.note(refused(), START_US + minute * MINUTE_US)
        buffer.note(refused(), START_US + minute * MINUTE_US)
    assert (len(buffer), buffer.dropped) == (3, 14)
    end = START_US + 20 * MINUTE_US
    rows = [*buffer.take(end, 2), *buffer.take(end, 2)]
    assert [(row.access.action, row.count) for row in rows] == [*([("session.refuse", 2)] * 3), (DROP, 14)]
    assert (len(buffer), buffer.dropped) == (0, 0)


def test_a_batch_is_bounded_and_at_the_end_all_are_taken() -> None:
    buffer = AccessBuffer()
    for number in range(50):
        buffer.note(refused(f"n{number}"), START_US)
    assert len(buffer.take(START_US + MINUTE_US, 20)) == 20
    assert buffer.take(START_US, 20) == []
    taken: list[MergedAccess] = []
    while rows := buffer.take(START_US, 20, is_last=True):
        taken += rows
    assert [row.access.actor for row in taken] == [f"person:n{number}" for number in range(20, 50)]


def test_what_the_server_does_waits_for_nothing() -> None:
    buffer = AccessBuffer()
    buffer.note(Access("server.start", "system", target="gw-1"), START_US + 5)
    [row] = buffer.take(START_US + 5, 10)
    assert (row.access.target, row.count) == ("gw-1", 1)
