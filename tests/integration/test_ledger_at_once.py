"""Does one statement that commits itself write what a transaction of several writes, or nothing?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError, OperationalError

from migrations import runner
from tenants.errors import DatabaseUnavailable, EpochEnded
from tenants.ledger.batch_insert import ROWS_AT_ONCE
from tenants.ledger.ledger import Ledger, _append, _append_at_once, _appended
from tenants.ledger.rows import LedgerRow
from tenants.storage.database import Database, create_sql_engine, open_database
from tenants.types import Amounts
from tests.integration.test_database import Gate
from tests.integration.test_ledger import row

ROWS = [
    row("a", charged_to=("tenant", 'key "1"', "tenant"), detail={"most": [1, 2.5, None], "word": "ö'\\\0"}),
    row("a", "settle", outcome="léngth", counted_input=0, counted_output=2**50, price_version=7),
    row("b", amounts=Amounts(0, 0, 4_500_000_000_000_000, 1, 2), model="", project_id="", key_id=""),
    row("b", "top_up", number=1, charged_to=("never noted twice",)),
    row("c", "adjust", amounts=Amounts(-(2**62), 0, -(2**63), 0)),
]


@pytest.fixture
async def sqlite(sqlite_url: str) -> Any:
    database = open_database(sqlite_url)
    yield database
    await database.close()


@pytest.fixture
def connection(sqlite_url: str) -> Any:
    """Beside the writer's own."""
    engine = create_sql_engine(sqlite_url, writing=True)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def everything(connection: Connection) -> list[Any]:
    """Every value of the two tables, with the type in which SQLite keeps it; without the ids."""
    found: list[Any] = []
    for table, order in (("ledger", "id"), ("counter_sets", "set_id, counter")):
        names = [each[1] for each in connection.exec_driver_sql(f"PRAGMA table_info({table})")]
        shown = ", ".join(f"{name}, typeof({name})" for name in names if name != "id")
        found.append(connection.exec_driver_sql(f"SELECT {shown} FROM {table} ORDER BY {order}").all())
    return found


def never(connection: Connection, appended: Sequence[Any]) -> list[bool]:
    raise AssertionError("this goes at once")


async def test_the_same_values_are_written(sqlite: Database, tmp_path: Path) -> None:
    appended = [_appended(each) for each in ROWS]
    at_once = [sqlite.write_together(never, each, at_once=_append_at_once) for each in appended]
    assert await asyncio.gather(*at_once) == [True] * 5
    runner.upgrade(url := f"sqlite:///{tmp_path}/twin.db")
    twin = open_database(url)
    assert await asyncio.gather(*(twin.write_together(_append, each) for each in appended)) == [True] * 5
    plainly = await twin.read(everything)
    assert await sqlite.read(everything) == plainly
    assert (len(plainly[0]), len(plainly[1])) == (5, 3)
    await twin.close()


async def test_the_ledger_goes_this_way_and_others_see_it(sqlite: Database, sqlite_url: str) -> None:
    ledger, other = Ledger(sqlite), open_database(sqlite_url)
    assert ledger._at_once is _append_at_once
    assert await ledger.append(ROWS[0], epoch=await ledger.next_epoch())
    assert await Ledger(other).find("a") == [replace(ROWS[0], charged_to=('key "1"', "tenant"))]
    await other.close()


@pytest.mark.parametrize(
    ("bad", "epoch"),
    [(row("old"), ""), (row("new"), "ended"), (row("first"), "")],
    ids=["there already", "another epoch", "twice in one batch"],
)
async def test_where_one_cannot_be_taken_nothing_is_changed(
    sqlite: Database, connection: Connection, bad: LedgerRow, epoch: str
) -> None:
    ledger = Ledger(sqlite)
    await ledger.append(row("old"))
    before = await sqlite.read(everything)
    batch = [_appended(row("first", charged_to=("x",))), _appended(bad, epoch)]
    with pytest.raises(IntegrityError):
        _append_at_once(connection, batch)
    driver_connection: Any = connection.connection.driver_connection
    assert not driver_connection.in_transaction
    assert await sqlite.read(everything) == before
    # And the plain way, which comes next, takes the others.
    sent = [ledger.append(each.row, epoch=each.epoch) for each in batch]
    answers = await asyncio.gather(*sent, return_exceptions=True)
    assert answers[0] is True
    assert isinstance(answers[1], EpochEnded) if epoch else answers[1] is False


async def test_an_epoch_in_force_is_looked_at(sqlite: Database, connection: Connection) -> None:
    epoch = await Ledger(sqlite).next_epoch()
    _append_at_once(connection, [_appended(row("r"), epoch)])
    await Ledger(sqlite).next_epoch()
    with pytest.raises(IntegrityError):
        _append_at_once(connection, [_appended(row("late"), epoch)])


async def test_more_rows_than_a_statement_holds_are_written_plainly(sqlite: Database) -> None:
    rows = [row(f"r{index}", charged_to=("x",)) for index in range(ROWS_AT_ONCE + 1)]
    gate = Gate()
    held = asyncio.create_task(sqlite.write(gate))
    await asyncio.to_thread(gate.entered.wait, 30)
    sent = [asyncio.create_task(Ledger(sqlite).append(each)) for each in rows]
    await asyncio.sleep(0)
    gate.opened.set()
    assert all(await asyncio.gather(*sent))
    await held
    assert _append_at_once(None, [_appended(each) for each in rows]) is None  # type: ignore[arg-type]
    found = await Ledger(sqlite).open_requests()
    assert [each.reserve.charged_to for each in found] == [("x",)] * len(rows)


class Way:
    """A way to write that fails as it is told to, and notes that it was asked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[list[str]] = []

    def __call__(self, connection: Connection, items: Sequence[str]) -> list[str] | None:
        self.asked.append(list(items))
        if self.error is not None:
            raise self.error
        return None


def plainly(connection: Connection, items: Sequence[str]) -> list[str]:
    return [f"plainly {item}" for item in items]


@pytest.mark.parametrize("error", [None, IntegrityError("", {}, Exception()), ZeroDivisionError()])
async def test_what_does_not_go_at_once_goes_plainly(sqlite: Database, error: Exception | None) -> None:
    way = Way(error)
    assert await sqlite.write_together(plainly, "a", at_once=way) == "plainly a"
    assert way.asked == [["a"]]


async def test_what_may_have_been_committed_is_not_done_again(sqlite: Database) -> None:
    way = Way(OperationalError("", {}, Exception("disk I/O error")))
    with pytest.raises(DatabaseUnavailable):
        await sqlite.write_together(never, "a", at_once=way)
    assert await sqlite.write_together(plainly, "b") == "plainly b"


async def test_beside_writes_of_another_kind_it_goes_plainly(sqlite: Database) -> None:
    way, gate = Way(AssertionError("others wait")), Gate()
    first = asyncio.create_task(sqlite.write(gate))
    await asyncio.to_thread(gate.entered.wait, 30)
    both = [
        asyncio.create_task(sqlite.write_together(plainly, "a", at_once=way)),
        asyncio.create_task(sqlite.write(lambda _: "another")),
    ]
    await asyncio.sleep(0)
    gate.opened.set()
    assert await asyncio.gather(*both) == ["plainly a", "another"]
    await first
    assert way.asked == []
