"""Does a statement do the same by the driver alone as by SQLAlchemy's own way?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError, IntegrityError, ProgrammingError

from tenants.storage import database as driver
from tenants.storage.database import Database, create_sql_engine

Execute = Callable[[Connection, str, tuple[Any, ...]], int]


def plainly(connection: Connection, statement: str, parameters: tuple[Any, ...] = ()) -> int:
    return connection.exec_driver_sql(statement, parameters).rowcount


def marks(connection: Connection, statement: str) -> str:
    return statement if connection.dialect.name == "sqlite" else statement.replace("?", "%s")


@pytest.fixture
def connection(database_url: str) -> Any:
    engine = create_sql_engine(database_url, writing=True)
    with engine.connect() as connection, connection.begin() as transaction:
        connection.execute(text("CREATE TABLE twin (id INTEGER PRIMARY KEY, body TEXT NOT NULL)"))
        yield connection
        transaction.rollback()
    engine.dispose()


@pytest.mark.parametrize("has_savepoint", [False, True])
def test_rows_and_their_number_are_the_same(connection: Connection, has_savepoint: bool) -> None:
    insert = marks(connection, "INSERT INTO twin (id, body) VALUES (?, ?), (?, ?) ON CONFLICT DO NOTHING")
    found: list[tuple[list[int], list[tuple[Any, ...]]]] = []
    for execute in (driver.execute, plainly):
        with connection.begin_nested() if has_savepoint else nullcontext():
            counts = [
                execute(connection, insert, (1, "a'%s?", 2, "ä")),
                execute(connection, insert, (2, "again", 3, "c")),
                execute(connection, marks(connection, "UPDATE twin SET body = ? WHERE id > ?"), ("x", 2)),
            ]
        rows = connection.execute(text("SELECT id, body FROM twin ORDER BY id")).all()
        found.append((counts, [tuple(row) for row in rows]))
        plainly(connection, "DELETE FROM twin")
    assert found[0] == found[1] == ([2, 1, 1], [(1, "a'%s?"), (2, "ä"), (3, "x")])


@pytest.mark.parametrize(
    ("statement", "parameters", "kind"),
    [
        ("INSERT INTO twin (id, body) VALUES (?, ?)", (1, None), IntegrityError),
        ("INSERT INTO twin (id) VALUES (?, ?)", (1, "a"), DBAPIError),
        ("INSERT INTO twin (id, body) VALUES (?, ?)", (1,), ProgrammingError),
    ],
)
def test_errors_are_the_same(
    connection: Connection, statement: str, parameters: tuple[Any, ...], kind: type[DBAPIError]
) -> None:
    said: list[tuple[type[Exception], type[BaseException] | None, str]] = []
    for execute in (driver.execute, plainly):
        plainly(connection, "SAVEPOINT before")
        with pytest.raises(kind) as caught:
            execute(connection, marks(connection, statement), parameters)
        plainly(connection, "ROLLBACK TO SAVEPOINT before")
        said.append((caught.type, type(caught.value.orig), str(caught.value)))
    assert said[0] == said[1]


async def test_a_transaction_begins_with_its_first_statement_written(database: Database) -> None:
    """SQLite's BEGIN goes by the driver as well: without it each statement would be its own transaction."""

    def begun(connection: Connection) -> bool:
        driver_connection: Any = connection.connection.driver_connection
        if connection.dialect.name == "sqlite":
            return bool(driver_connection.in_transaction)
        return driver_connection.info.transaction_status.name != "IDLE"

    assert await database.write(begun) is (database.dialect == "sqlite")
