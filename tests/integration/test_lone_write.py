"""Is a lone write committed where it is asked for, and the thread's wherever it might have to wait?"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from tenants.errors import DatabaseUnavailable, EpochEnded
from tenants.ledger.ledger import Ledger
from tenants.storage import database as driver
from tenants.storage.database import (
    LONG_S,
    REST_S,
    THREAD_EVERY,
    Database,
    LoneWriter,
    create_sql_engine,
    open_database,
)
from tests.integration.test_database import Gate
from tests.integration.test_ledger import row


class Ways:
    """Both ways of a write; notes which thread went which."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []
        self.error: Exception | None = None

    def _note(self, way: str) -> None:
        self.seen.append((way, threading.current_thread() is threading.main_thread()))

    def plainly(self, connection: Connection, items: Sequence[str]) -> list[str]:
        self._note("plainly")
        connection.exec_driver_sql("INSERT INTO settings VALUES (?, ?)", (items[0], "plainly"))
        return [item.upper() for item in items]

    def at_once(self, connection: Connection, items: Sequence[str]) -> list[str] | None:
        self._note("at once")
        if self.error is not None:
            raise self.error
        driver.execute(connection, "INSERT INTO settings VALUES (?, ?)", (items[0], "at once"))
        return [item.upper() for item in items]


@pytest.fixture
async def sqlite(sqlite_url: str) -> Any:
    database = open_database(sqlite_url)
    yield database
    await database.close()


async def write(database: Database, ways: Ways, item: str, *, alone: bool = True) -> str:
    return await database.write_together(ways.plainly, item, at_once=ways.at_once, alone=alone)


async def test_who_is_alone_commits_in_the_loop_and_others_in_the_thread(
    sqlite: Database, sqlite_url: str
) -> None:
    ways = Ways()
    writing = write(sqlite, ways, "a")
    with pytest.raises(StopIteration) as stopped:
        writing.send(None)  # done before anything is waited for
    assert stopped.value.value == "A"
    with sqlite3.connect(sqlite_url.removeprefix("sqlite:///")) as other:
        assert other.execute("SELECT value FROM settings WHERE name = 'a'").fetchall() == [("at once",)]
    other.close()
    assert await write(sqlite, ways, "b", alone=False) == "B"
    assert ways.seen == [("at once", True), ("at once", False)]
    assert (sqlite.commits, sqlite.writes) == (2, 2)


async def test_it_waits_for_nobody(sqlite: Database, sqlite_url: str) -> None:
    ways = Ways()
    other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")  # another process writes
    writing = asyncio.create_task(write(sqlite, ways, "a"))
    await asyncio.sleep(0)
    assert ways.seen[0] == ("at once", True)
    assert not writing.done()
    other.execute("ROLLBACK")
    other.close()
    assert await writing == "A"
    assert ways.seen[1:] == [("at once", False)]
    # And what waits in the thread goes first.
    gate = Gate()
    held = asyncio.create_task(sqlite.write(gate))
    await asyncio.to_thread(gate.entered.wait, 30)
    queued = asyncio.create_task(write(sqlite, ways, "b", alone=False))
    await asyncio.sleep(0)
    behind = asyncio.create_task(write(sqlite, ways, "c"))
    await asyncio.sleep(0)
    assert len(ways.seen) == 2
    gate.opened.set()
    assert await asyncio.gather(held, queued, behind) == [None, "B", "C"]
    assert not any(in_loop for _, in_loop in ways.seen[2:])


async def test_where_it_changes_nothing_the_thread_says_why(sqlite: Database) -> None:
    ledger = Ledger(sqlite)
    epoch = await ledger.next_epoch()
    assert await ledger.append(row("r"), epoch=epoch, alone=True)
    assert await ledger.append(row("r"), epoch=epoch, alone=True) is False
    with pytest.raises(EpochEnded):
        await ledger.append(row("late"), epoch="another", alone=True)
    first = row("r", "settle")
    assert await ledger.settle(first, alone=True) == first
    assert await ledger.settle(row("r", "settle", outcome="other"), alone=True) == first
    assert await ledger.find("r") == [row("r"), first]


async def test_what_may_have_been_committed_is_not_done_again(sqlite: Database) -> None:
    ways = Ways()
    ways.error = OperationalError("", {}, Exception("disk I/O error"))
    with pytest.raises(DatabaseUnavailable):
        await write(sqlite, ways, "a")
    ways.error = None
    assert await write(sqlite, ways, "b") == "B"
    assert ways.seen == [("at once", True)] * 2


async def test_a_closed_database_refuses_the_lone_too(sqlite: Database) -> None:
    ways = Ways()
    await write(sqlite, ways, "a")
    await sqlite.close()
    with pytest.raises(DatabaseUnavailable):
        await write(sqlite, ways, "b")
    assert len(ways.seen) == 1


class Disk:
    """A clock that a write moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.commit_s = LONG_S / 2

    def clock(self) -> float:
        return self.now_s

    def at_once(self, connection: Connection, items: Sequence[str]) -> list[str]:
        self.now_s += self.commit_s
        return list(items)


def test_while_commits_are_slow_the_loop_is_held_up_no_more(sqlite_url: str) -> None:
    disk = Disk()
    lone = LoneWriter(create_sql_engine(sqlite_url, writing=True), disk.clock)
    disk.commit_s = LONG_S * 50
    assert lone.write(disk.at_once, "one pause is not usual, however long") is not None
    disk.commit_s = LONG_S / 4
    assert all(lone.write(disk.at_once, "quick") for _ in range(10))
    disk.commit_s = LONG_S * 3
    done = 0
    while lone.write(disk.at_once, "slow") is not None:
        done += 1
        assert done <= 2
    disk.now_s += REST_S * 0.99
    assert lone.write(disk.at_once, "rests") is None
    disk.now_s += REST_S * 0.02
    assert lone.write(disk.at_once, "tried again") is not None
    assert lone.commits == 12 + done
    lone.close()


def test_now_and_then_it_is_the_threads_turn_which_empties_the_log(sqlite_url: str) -> None:
    disk = Disk()
    lone = LoneWriter(create_sql_engine(sqlite_url, writing=True), disk.clock)
    found = [lone.write(disk.at_once, "a") for _ in range(2 * THREAD_EVERY)]
    assert [number for number, each in enumerate(found, 1) if each is None] == [
        THREAD_EVERY,
        2 * THREAD_EVERY,
    ]

    def pragma(connection: Connection, items: Sequence[str]) -> list[Any]:
        return [connection.exec_driver_sql(f"PRAGMA {items[0]}").scalar()]

    assert lone.write(pragma, "wal_autocheckpoint") == [0]
    assert lone.write(pragma, "synchronous") == [2]
    lone.close()


def test_who_finds_it_in_use_is_not_alone(sqlite_url: str) -> None:
    lone = LoneWriter(create_sql_engine(sqlite_url, writing=True))
    inner: list[Any] = []

    def at_once(connection: Connection, items: Sequence[str]) -> list[str]:
        inner.append(lone.write(at_once, "inner"))
        return list(items)

    assert lone.write(at_once, "outer") == ["outer"]
    assert inner == [None]
    lone.close()
