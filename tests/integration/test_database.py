"""Writes are durable when answered, fail separately and share a commit."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import Connection, insert, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, ProgrammingError

from migrations import runner
from tenants.errors import DatabaseUnavailable, NotWritten
from tenants.storage.database import Database, create_sql_engine, execute_on_driver, open_database
from tenants.storage.tables import settings
from tests.support import services


def put(name: str, value: str = "x") -> Callable[[Connection], str]:
    """A write of one row; its result is the row's name."""

    def work(connection: Connection) -> str:
        connection.execute(insert(settings).values(name=name, value=value))
        return name

    return work


def names(connection: Connection) -> list[str]:
    return sorted(connection.execute(select(settings.c.name)).scalars())


class Gate:
    """A write that holds the writer until it is opened, so that others must queue behind it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, connection: Connection) -> None:
        self.entered.set()
        assert self.opened.wait(30)


async def test_waiting_writes_share_one_commit(database: Database) -> None:
    gate = Gate()
    first = asyncio.create_task(database.write(gate))
    await asyncio.to_thread(gate.entered.wait, 30)
    rest = [asyncio.create_task(database.write(put(f"n{index}"))) for index in range(50)]
    await asyncio.sleep(0)
    gate.opened.set()
    await asyncio.gather(first, *rest)
    assert (database.writes, database.commits) == (51, 2)
    assert len(await database.read(names)) == 50


async def test_writes_of_one_kind_that_follow_each_other_are_done_at_once(database: Database) -> None:
    done: list[list[str]] = []

    def put_all(connection: Connection, some: Sequence[str]) -> list[str]:
        done.append(list(some))
        return [put(name)(connection).upper() for name in some]

    gate = Gate()
    first = asyncio.create_task(database.write(gate))
    await asyncio.to_thread(gate.entered.wait, 30)
    sent = [asyncio.create_task(database.write_together(put_all, name)) for name in ("a", "b")]
    sent.append(asyncio.create_task(database.write(put("c"))))
    sent += [asyncio.create_task(database.write_together(put_all, name)) for name in ("d", "a", "e")]
    await asyncio.sleep(0)
    gate.opened.set()
    await first
    answers = await asyncio.gather(*sent, return_exceptions=True)
    # The second "a" fails, so all were undone and each was done again, alone.
    assert done == [["a", "b"], ["d", "a", "e"], ["a"], ["b"], ["d"], ["a"], ["e"]]
    assert isinstance(answers.pop(4), IntegrityError)
    assert answers == ["A", "B", "c", "D", "E"]
    assert await database.read(names) == ["a", "b", "c", "d", "e"]


async def test_callers_in_other_event_loops_are_answered_there(database: Database) -> None:
    gate = Gate()
    first = asyncio.create_task(database.write(gate))
    await asyncio.to_thread(gate.entered.wait, 30)
    elsewhere = [
        asyncio.create_task(asyncio.to_thread(asyncio.run, database.write(put(f"n{index}"))))
        for index in range(3)
    ]
    here = asyncio.create_task(database.write(put("here")))
    await asyncio.sleep(0)
    gate.opened.set()
    assert sorted(await asyncio.gather(here, *elsewhere)) == ["here", "n0", "n1", "n2"]
    await first


async def test_a_failing_write_fails_alone(database: Database) -> None:
    def half_done(connection: Connection) -> None:
        put("half")(connection)
        raise ZeroDivisionError

    gate = Gate()
    tasks = [asyncio.create_task(database.write(gate))]
    await asyncio.to_thread(gate.entered.wait, 30)
    works = [
        put("a"),
        half_done,
        put("a"),
        put("b"),
        lambda connection: connection.execute(text("SELECT nonsense(")),
        put("c"),
    ]
    tasks += [asyncio.create_task(database.write(work)) for work in works]
    await asyncio.sleep(0)
    gate.opened.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results[2:4]] == [ZeroDivisionError, IntegrityError]
    assert isinstance(results[5], DatabaseUnavailable)
    assert [results[index] for index in (1, 4, 6)] == ["a", "b", "c"]
    assert await database.read(names) == ["a", "b", "c"]
    assert database.commits == 2


async def test_a_read_sees_one_state_and_changes_nothing(database: Database) -> None:
    await database.write(put("a"))
    await database.read(put("b"))
    assert await database.read(names) == ["a"]


async def test_what_was_answered_is_committed_for_others_to_see(
    database: Database, database_url: str
) -> None:
    other = open_database(database_url)
    await database.write(put("a"))
    assert await other.read(names) == ["a"]
    await other.close()


async def test_full_queues_refuse_at_once(database_url: str) -> None:
    small = Database(database_url, max_queued=1, max_reads=1, readers=1)
    gate, read_gate = Gate(), Gate()
    first = asyncio.create_task(small.write(gate))
    await asyncio.to_thread(gate.entered.wait, 30)
    second = asyncio.create_task(small.write(put("second")))
    await asyncio.sleep(0)
    with pytest.raises(DatabaseUnavailable, match="too many writes"):
        await small.write(put("third"))
    reading = asyncio.create_task(small.read(read_gate))
    await asyncio.to_thread(read_gate.entered.wait, 30)
    with pytest.raises(DatabaseUnavailable, match="too many reads"):
        await small.read(names)
    gate.opened.set()
    read_gate.opened.set()
    await asyncio.gather(first, second, reading)
    assert await small.read(names) == ["second"]
    await small.close()


async def test_a_write_cancelled_before_its_turn_never_happens(database: Database) -> None:
    gate = Gate()
    first = asyncio.create_task(database.write(gate))
    await asyncio.to_thread(gate.entered.wait, 30)
    waiting = asyncio.create_task(database.write(put("cancelled")))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)  # the cancellation passes from the task to the queued write
    gate.opened.set()
    await first
    await database.write(put("later"))
    assert await database.read(names) == ["later"]


async def test_closing_finishes_what_waits_and_then_refuses(database_url: str) -> None:
    database = open_database(database_url)
    tasks = [asyncio.create_task(database.write(put(f"n{index}"))) for index in range(20)]
    await asyncio.sleep(0)
    await database.close()
    await asyncio.gather(*tasks)
    with pytest.raises(DatabaseUnavailable):
        await database.write(put("late"))
    with pytest.raises(DatabaseUnavailable):
        await database.read(names)
    await database.close()
    again = open_database(database_url)
    assert len(await again.read(names)) == 20
    await again.close()


async def test_sqlite_is_configured_for_durability(sqlite_url: str) -> None:
    database = open_database(sqlite_url)

    def pragmas(connection: Connection) -> list[object]:
        questions = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        return [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in questions]

    expected = ["wal", 2, 1, 5000]
    assert await database.write(pragmas) == expected
    assert await database.read(pragmas) == expected
    await database.close()


async def test_sqlite_is_in_a_transaction_before_the_first_statement(sqlite_url: str) -> None:
    database = open_database(sqlite_url)

    def has_begun(connection: Connection) -> bool:
        return bool(cast(Any, connection.connection.driver_connection).in_transaction)

    assert await database.write(has_begun)
    await database.close()


async def test_postgresql_commits_synchronously_whatever_its_default(postgres_url: str) -> None:
    database = open_database(postgres_url)
    name = services.database_name(postgres_url)
    await database.write(
        lambda connection: connection.execute(text(f'ALTER DATABASE "{name}" SET synchronous_commit = off'))
    )
    await database.close()
    database = open_database(postgres_url)
    show = text("SHOW synchronous_commit")
    assert await database.write(lambda connection: connection.execute(show).scalar()) == "on"
    await database.close()


async def test_a_transaction_that_sqlite_undid_by_itself_is_no_success(sqlite_url: str) -> None:
    # "Disk full" makes SQLite roll the whole transaction back, others' writes in the batch included.
    database = open_database(sqlite_url)
    gate = Gate()
    tasks = [asyncio.create_task(database.write(gate))]
    await asyncio.to_thread(gate.entered.wait, 30)

    def fill(connection: Connection) -> None:
        connection.exec_driver_sql("PRAGMA max_page_count = 1")
        for index in range(2_000):
            put(f"big{index}", "x" * 200)(connection)

    tasks += [asyncio.create_task(database.write(work)) for work in (put("early"), fill, put("late"))]
    await asyncio.sleep(0)
    gate.opened.set()
    results = await asyncio.gather(*tasks[1:], return_exceptions=True)
    stored = await database.read(names)
    assert stored == []
    assert all(isinstance(result, DatabaseUnavailable) for result in results)
    await database.close()


async def test_a_locked_sqlite_is_unavailable_not_a_stack_trace(sqlite_url: str) -> None:
    database = Database(sqlite_url, busy_timeout_s=0.1)
    other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatabaseUnavailable) as caught:
        await database.write(put("a"))
    assert "lock" not in str(caught.value)
    other.execute("ROLLBACK")
    other.close()
    await database.write(put("a"))
    assert await database.read(names) == ["a"]
    await database.close()


def leave_no_room(connection: Connection) -> None:
    pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")


def make_read_only(connection: Connection) -> None:
    connection.exec_driver_sql("PRAGMA query_only=ON")


@pytest.mark.parametrize(
    ("prevent", "name"), [(leave_no_room, "ENOSPC"), (make_read_only, "EROFS")], ids=["full", "read-only"]
)
async def test_what_prevents_writes_is_named_until_one_succeeds(
    sqlite_url: str, prevent: Callable[[Connection], None], name: str
) -> None:
    database = open_database(sqlite_url)
    await database.write(prevent)
    await database.ping()
    with pytest.raises(NotWritten, match=name) as caught:
        await asyncio.gather(*(database.write(put(f"n{index}", "x" * 250)) for index in range(200)))
    assert "sqlite" not in str(caught.value), "nothing of the driver's text"
    with pytest.raises(NotWritten, match=name):
        await database.ping()
    # A new connection has room and writes; what was refused is not there.
    await database.write(put("later"))
    await database.ping()
    assert "later" in await database.read(names)
    await database.close()


@pytest.mark.parametrize(
    ("state", "name"), [("53100", "ENOSPC"), ("25006", "EROFS"), ("57014", "not available")]
)
async def test_what_postgresql_cannot_store_is_named(postgres_url: str, state: str, name: str) -> None:
    """A server cannot be made to run out of disk here: it raises the error itself."""
    database = open_database(postgres_url)
    failing = text(f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{state}'; END $$")
    with pytest.raises(DatabaseUnavailable, match=name):
        await database.write(lambda connection: connection.execute(failing))
    await database.close()


async def test_a_killed_postgresql_is_unavailable_and_loses_nothing_answered() -> None:
    server = services.start_postgres()
    try:
        url = services.create_database(server.url)
        runner.upgrade(url)
        database = open_database(url)
        await database.write(put("before"))
        server.kill()
        for attempt in (database.write(put("during")), database.read(names), database.ping()):
            with pytest.raises(DatabaseUnavailable) as caught:
                await attempt
            assert "127.0.0.1" not in str(caught.value)
        server.start()
        await database.write(put("after"))
        assert await database.read(names) == ["after", "before"]
        await database.close()
    finally:
        server.stop()


def test_what_was_answered_survives_kill_9_of_the_writer(sqlite_url: str) -> None:
    # The child prints each name once its write was answered, then is killed in the middle of its work.
    code = """
import asyncio, sys
from sqlalchemy import insert
from tenants.storage.database import open_database
from tenants.storage.tables import settings
async def main():
    database = open_database(sys.argv[1])
    async def one(index):
        row = insert(settings).values(name=f"n{index}", value="x")
        await database.write(lambda connection: connection.execute(row).rowcount)
        print(f"n{index}", flush=True)
    while True:
        base = main.done
        await asyncio.gather(*(one(base + index) for index in range(10)))
        main.done += 10
main.done = 0
asyncio.run(main())
"""
    root = Path(__file__).parents[2]
    child = subprocess.Popen([sys.executable, "-c", code, sqlite_url], stdout=subprocess.PIPE, cwd=root)
    assert child.stdout is not None
    answered = [child.stdout.readline().decode().strip() for _ in range(95)]
    child.kill()
    answered += child.stdout.read().decode().split("\n")[:-1]
    child.wait()
    child.stdout.close()
    with sqlite3.connect(sqlite_url.removeprefix("sqlite:///")) as connection:
        stored = {row[0] for row in connection.execute("SELECT name FROM settings")}
    connection.close()
    assert len(answered) >= 95
    assert {name for name in answered if name} <= stored


def through_sqlalchemy(connection: Connection, statement: str, parameters: tuple[Any, ...] = ()) -> int:
    return connection.exec_driver_sql(statement, parameters).rowcount


def marks(connection: Connection, statement: str) -> str:
    return statement if connection.dialect.name == "sqlite" else statement.replace("?", "%s")


@pytest.fixture
def twin_table(database_url: str) -> Iterator[Connection]:
    """A transaction with a table of its own, rolled back at the end."""
    engine = create_sql_engine(database_url, writing=True)
    with engine.connect() as connection, connection.begin() as transaction:
        connection.execute(text("CREATE TABLE twin (id INTEGER PRIMARY KEY, body TEXT NOT NULL)"))
        yield connection
        transaction.rollback()
    engine.dispose()


@pytest.mark.parametrize("has_savepoint", [False, True])
def test_a_statement_on_the_driver_changes_the_same_rows(twin_table: Connection, has_savepoint: bool) -> None:
    insert_twice = marks(
        twin_table, "INSERT INTO twin (id, body) VALUES (?, ?), (?, ?) ON CONFLICT DO NOTHING"
    )
    found = []
    for execute in (execute_on_driver, through_sqlalchemy):
        with twin_table.begin_nested() if has_savepoint else nullcontext():
            counts = [
                execute(twin_table, insert_twice, (1, "a'%s?", 2, "ä")),
                execute(twin_table, insert_twice, (2, "again", 3, "c")),
                execute(twin_table, marks(twin_table, "UPDATE twin SET body = ? WHERE id > ?"), ("x", 2)),
            ]
        rows = twin_table.execute(text("SELECT id, body FROM twin ORDER BY id")).all()
        found.append((counts, [tuple(row) for row in rows]))
        through_sqlalchemy(twin_table, "DELETE FROM twin")
    assert found[0] == found[1] == ([2, 1, 1], [(1, "a'%s?"), (2, "ä"), (3, "x")])


@pytest.mark.parametrize(
    ("statement", "parameters", "kind"),
    [
        ("INSERT INTO twin (id, body) VALUES (?, ?)", (1, None), IntegrityError),
        ("INSERT INTO twin (id) VALUES (?, ?)", (1, "a"), DBAPIError),
        ("INSERT INTO twin (id, body) VALUES (?, ?)", (1,), ProgrammingError),
    ],
)
def test_a_statement_on_the_driver_raises_the_same_errors(
    twin_table: Connection, statement: str, parameters: tuple[Any, ...], kind: type[DBAPIError]
) -> None:
    raised = []
    for execute in (execute_on_driver, through_sqlalchemy):
        through_sqlalchemy(twin_table, "SAVEPOINT before")
        with pytest.raises(kind) as caught:
            execute(twin_table, marks(twin_table, statement), parameters)
        through_sqlalchemy(twin_table, "ROLLBACK TO SAVEPOINT before")
        raised.append((caught.type, type(caught.value.orig), str(caught.value)))
    assert raised[0] == raised[1]
