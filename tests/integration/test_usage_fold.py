"""Every charge is in the sums of usage exactly once: out of order, at once, after a crash or a rebuild."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, delete, event, insert, select, text, update

from gateway.cluster.usage_folder import UsageFolder
from tenants.errors import Invalid
from tenants.ledger.batch_insert import insert_rows
from tenants.ledger.verify import verify_ledger
from tenants.storage.database import Database, create_sql_engine, open_database
from tenants.storage.tables import usage_fold, usage_labels, usage_sums
from tenants.usage.fold import HOURS_KEPT_US, fold, is_behind, position, purge_hours
from tenants.usage.query import UsageQuery
from tenants.usage.sums import AMOUNTS, DAY_US, HOUR_US, Grain
from tenants.usage.verify import rebuild_usage, usage_problems
from tests.support.builders import site
from tests.support.usage import (
    MONDAY_US,
    answered,
    as_mapping,
    by_ledger,
    fold_all,
    row,
    span_of,
    stored,
    traffic,
    write,
)

WEEK = UsageQuery(MONDAY_US, MONDAY_US + 7 * DAY_US)


def ended(found: object) -> int:
    """How many requests an answer counts."""
    return sum(each.amounts[AMOUNTS.index("ended_requests")] for each in found.rows)  # type: ignore[attr-defined]


async def test_sums_are_the_ledger_by_every_group_and_window(database: Database) -> None:
    rows = traffic(500)
    await write(database, rows)
    charges = sum(each[1] != "reserve" for each in rows)
    assert await fold_all(database, most=97) == charges
    assert not await database.read(is_behind)
    from_us, to_us = span_of(rows)
    groups = ("tenant", "project", "key", "model", "tier", "outcome", "label:team", "label:none")
    for group in [(), *permutations(groups, 2)]:
        query = UsageQuery(from_us, to_us, "day", group)
        found = await answered(database, query)
        assert found.includes_unfolded
        assert as_mapping(found) == await by_ledger(database, query), group
    for query in (
        UsageQuery(from_us, to_us, "hour", ("tenant", "model")),
        UsageQuery(from_us, to_us, "month", ("key",), tenant_id="ten_1"),
        UsageQuery(from_us, to_us, "day", ("tier",), time_zone="Europe/Berlin"),
        UsageQuery(from_us + 5 * HOUR_US, to_us - 7 * HOUR_US, "total", ("outcome",), model="model-1"),
        UsageQuery(from_us, to_us, "total", ("key",), labels=(("team", "a"),), tier="standard"),
        # From the ledger itself.
        UsageQuery(from_us, to_us, "hour", ("key", "label:app"), tenant_id="ten_0"),
        UsageQuery(from_us, to_us, "day", ("model",), time_zone="Asia/Kolkata", tenant_id="ten_0"),
    ):
        found = await answered(database, query)
        assert found.rows
        assert as_mapping(found) == await by_ledger(database, query), query
    assert await usage_problems(database) == []


async def test_what_is_not_folded_yet_is_added(database: Database) -> None:
    rows = traffic(300)
    await write(database, rows[:200])
    await fold_all(database)
    await write(database, rows[200:])
    query = UsageQuery(*span_of(rows), "day", ("tenant", "key"))
    found = await answered(database, query)
    assert as_mapping(found) == await by_ledger(database, query)
    assert found.folded_us == max(each[19] for each in rows[:200] if each[1] != "reserve")


async def test_too_much_that_is_not_folded_is_left_out_and_said(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenants.usage.read.MOST_UNFOLDED", 3)
    await write(database, [row(f"a{number}") for number in range(3)])
    await fold_all(database)
    await write(database, [row(f"b{number}") for number in range(3)])
    found = await answered(database, WEEK)
    assert (ended(found), found.includes_unfolded) == (6, True)
    await write(database, [row("c")])
    found = await answered(database, WEEK)
    assert (ended(found), found.includes_unfolded) == (3, False)


async def test_pages_hold_every_group_once_while_rows_arrive(database: Database) -> None:
    from tenants.usage.read import usage

    rows = traffic(400)
    await write(database, rows[:500])
    await fold_all(database)
    await write(database, rows[500:])
    query = UsageQuery(*span_of(rows), "day", ("tenant", "key", "label:team"))
    whole = await answered(database, query)
    for size in (1, 7, len(whole.rows) - 1, len(whole.rows)):
        seen, after, number = [], None, 0
        while True:
            page = await database.read(
                lambda connection, after=after, size=size: usage(connection, query, after, size)
            )
            assert len(page.rows) <= size
            seen += page.rows
            number += 1
            # A group that is behind the cursor already.
            await write(
                database, [row(f"late_{size}_{number}", key_id="key_0", tenant_id="ten_0", outcome="x")]
            )
            if not page.has_more:
                break
            after = page.rows[-1].key
        keys = [each.key for each in seen]
        assert keys == sorted(set(keys))
        assert {each.key for each in whole.rows} <= set(keys)


# ---------------------------------------------------------------- exactly once


@contextmanager
def writing(url: str) -> Iterator[Connection]:
    """A connection of another process's, with a transaction open."""
    engine = create_sql_engine(url, writing=True)
    try:
        with engine.connect() as connection:
            connection.begin()
            yield connection
    finally:
        engine.dispose()


async def test_ids_that_become_visible_out_of_order_are_not_lost(postgres_url: str) -> None:
    database = open_database(postgres_url)
    with writing(postgres_url) as held:
        insert_rows(held, [row("first")])
        await write(database, [row("second")])
        for _ in range(3):
            await fold_all(database)
        # The id of `second` is higher, and `first` may still come: neither is folded, both will be.
        assert (await database.read(position)).folded_id == 0  # type: ignore[union-attr]
        assert ended(await answered(database, WEEK)) == 1
        await write(database, [row("third")])
        held.commit()
    assert await fold_all(database) >= 2
    assert await fold_all(database) <= 1
    assert not await database.read(is_behind)
    assert ended(await answered(database, WEEK)) == 3
    assert await usage_problems(database) == []
    await database.close()


async def test_a_position_moves_although_some_transaction_always_writes(postgres_url: str) -> None:
    database = open_database(postgres_url)
    for number in range(6):
        with writing(postgres_url) as other:
            insert_rows(other, [row(f"other_{number}")])
            await write(database, [row(f"own_{number}")])
            await fold_all(database)
            if number:
                # All that had been written when the transaction before this one ended.
                assert ended(await answered(database, WEEK)) == 2 * number + 1
                at = await database.read(position)
                assert at is not None
                assert at.folded_id >= 2 * number - 1
            other.commit()
    assert await fold_all(database) > 0
    assert await usage_problems(database) == []
    await database.close()


async def test_an_insert_that_waits_for_another_holds_an_id(postgres_url: str) -> None:
    """It has no transaction number yet, so `pg_snapshot_xmin` would not see it."""
    database = open_database(postgres_url)
    with writing(postgres_url) as first, writing(postgres_url) as second:
        insert_rows(first, [row("same")])
        waits = asyncio.create_task(asyncio.to_thread(insert_rows, second, [row("same")]))
        with writing(postgres_url) as looking:
            while not looking.execute(text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar():
                looking.rollback()
                await asyncio.sleep(0.01)
        await write(database, [row("later")])
        assert await fold_all(database) == 0
        first.rollback()
        assert await waits == 1
        assert await fold_all(database) == 0
        second.commit()
    assert await fold_all(database) == 2
    assert ended(await answered(database, WEEK)) == 2
    await database.close()


async def test_what_begins_while_a_fold_looks_is_not_missed(postgres_url: str) -> None:
    """A transaction takes an id, and another one the next and commits, between the two reads of a look."""
    database = open_database(postgres_url)
    with writing(postgres_url) as begun, writing(postgres_url) as other:
        looks = 0

        def between(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
            nonlocal looks
            if ("max(ledger.id)" in statement or "pg_locks" in statement) and (looks := looks + 1) == 1:
                insert_rows(begun, [row("lower")])
                insert_rows(other, [row("higher")])
                other.commit()

        event.listen(Engine, "after_cursor_execute", between)
        try:
            assert await fold_all(database) == 0
        finally:
            event.remove(Engine, "after_cursor_execute", between)
        assert looks == 2
        assert await fold_all(database) == 0
        begun.commit()
    assert await fold_all(database) == 2
    assert ended(await answered(database, WEEK)) == 2
    await database.close()


async def test_gateways_fold_while_a_transaction_is_held_open(postgres_url: str) -> None:
    databases = [open_database(postgres_url) for _ in range(2)]
    folders = [UsageFolder(site(each, lambda: MONDAY_US / 1e6)) for each in databases]
    rows = traffic(200, seed=3)
    with writing(postgres_url) as held:
        for number, start in enumerate(range(0, len(rows), 100)):
            await write(databases[number % 2], rows[start : start + 100])
            if number == 2:
                insert_rows(held, [row("held")])
            await asyncio.gather(*(each.flush() for each in folders))
        assert ended(await answered(databases[1], WEEK)) == 200
        held.commit()
    # Two turns: what was newest when the held one was seen, and the rest.
    for _ in range(2):
        await asyncio.gather(*(each.flush() for each in folders))
    assert not await databases[0].read(is_behind)
    assert ended(await answered(databases[0], WEEK)) == 201
    assert await usage_problems(databases[0]) == []
    for each in databases:
        await each.close()


async def test_two_that_fold_at_once_count_nothing_twice(database_url: str) -> None:
    databases = [open_database(database_url) for _ in range(2)]
    rows = traffic(240, seed=7)

    async def folds(database: Database) -> int:
        charges = 0
        while not written.is_set() or await database.read(is_behind):
            charges += (await database.write(lambda connection: fold(connection, 20))).charges
        return charges

    written = asyncio.Event()
    folding = [asyncio.create_task(folds(each)) for each in databases]
    for start in range(0, len(rows), 50):
        await write(databases[start // 50 % 2], rows[start : start + 50])
    written.set()
    assert sum(await asyncio.gather(*folding)) == sum(each[1] != "reserve" for each in rows)
    query = UsageQuery(*span_of(rows), "day", ("tenant", "key", "model"))
    assert as_mapping(await answered(databases[0], query)) == await by_ledger(databases[1], query)
    assert await usage_problems(databases[0]) == []
    for each in databases:
        await each.close()


async def test_a_fold_that_dies_changes_nothing(database: Database) -> None:
    await write(database, traffic(50))

    def dies(connection: Connection) -> None:
        assert fold(connection, 20).charges == 20
        raise Invalid("fold", "dies before its commit")

    with pytest.raises(Invalid):
        await database.write(dies)
    assert await database.read(stored) == {"usage_sums": [], "usage_labels": []}
    await fold_all(database)
    assert await usage_problems(database) == []


# ---------------------------------------------------------------- verify and rebuild


async def test_wrong_sums_are_found_and_a_rebuild_gives_identical_tables(database: Database) -> None:
    rows = traffic(400)
    await write(database, rows[:600])
    await fold_all(database)
    right = await database.read(stored)

    def break_them(connection: Connection) -> None:
        is_key = usage_sums.c.grain == Grain.KEY_DAY.value
        connection.execute(delete(usage_sums).where(is_key, usage_sums.c.tenant_id == "ten_0"))
        connection.execute(
            update(usage_sums).where(usage_sums.c.grain == "hour").values(gpu_ms=usage_sums.c.gpu_ms + 1)
        )
        connection.execute(delete(usage_labels))
        orphan = dict.fromkeys(AMOUNTS, 0) | {
            "requests": 3,
            "grain": "day",
            "start_us": 0,
            "tenant_id": "ten_x",
        }
        others = ("project_id", "key_id", "model", "tier", "outcome", "label_set")
        connection.execute(insert(usage_sums).values(orphan | dict.fromkeys(others, "")))

    await database.write(break_them)
    problems = await usage_problems(database)
    assert len(problems) == 21
    assert problems[-1].startswith("and more")
    report = await verify_ledger(database, None)
    assert problems[0] in report.problems
    # The fold goes on meanwhile.
    await write(database, rows[600:])
    corrected, folded = await asyncio.gather(rebuild_usage(database), fold_all(database, 10))
    assert corrected
    assert folded
    assert await usage_problems(database) == []
    # What is not folded yet is no difference.
    await write(database, [row("unfolded", tenant_id="ten_0")])
    assert await usage_problems(database) == []
    assert await rebuild_usage(database) == 0
    assert not [each for each in (await verify_ledger(database, None)).problems if "usage" in each]
    again = await database.read(stored)
    assert {each[:9] for each in right["usage_sums"]} <= {each[:9] for each in again["usage_sums"]}
    await database.write(lambda connection: connection.execute(delete(usage_sums)).rowcount)
    await rebuild_usage(database)
    assert await database.read(stored) == again


async def test_a_lost_position_is_mended(database: Database) -> None:
    await write(database, traffic(100))
    await fold_all(database)
    right = await database.read(stored)
    await database.write(
        lambda connection: connection.execute(update(usage_fold).values(folded_id=0)).rowcount
    )
    assert await usage_problems(database)
    await rebuild_usage(database)
    await fold_all(database)
    assert await database.read(stored) == right


async def test_of_two_rebuilds_the_later_one_counts(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenants.usage.verify.CORRECTED", 5)
    await write(database, traffic(200))
    await fold_all(database)
    right = await database.read(stored)
    await database.write(lambda connection: connection.execute(delete(usage_sums)).rowcount)
    ended_ = await asyncio.gather(rebuild_usage(database), rebuild_usage(database), return_exceptions=True)
    assert sum(isinstance(each, Invalid) for each in ended_) <= 1
    await rebuild_usage(database)
    assert await database.read(stored) == right


async def test_old_hours_are_deleted_days_stay(database: Database) -> None:
    now_us = MONDAY_US + HOURS_KEPT_US + DAY_US
    old, recent = MONDAY_US + HOUR_US, MONDAY_US + 2 * DAY_US
    await write(database, [row("old", at_us=old), row("recent", at_us=recent)])
    await fold_all(database)
    purge = lambda connection: purge_hours(connection, now_us)  # noqa: E731
    assert await database.write(purge) is True
    assert await database.write(purge) is False
    # A row of such an hour that comes later makes no hour again.
    await write(database, [row("late", at_us=old)])
    await fold_all(database)
    hours = select(usage_sums.c.start_us).where(usage_sums.c.grain == "hour")
    assert await database.read(lambda connection: connection.execute(hours).scalars().all()) == [recent]
    assert await usage_problems(database) == []
    assert await rebuild_usage(database) == 0
    assert ended(await answered(database, WEEK)) == 3
    with pytest.raises(Invalid, match="the hours before 2026-01-06"):
        await answered(database, UsageQuery(old, recent, "hour"))
    # Of one tenant the ledger knows.
    assert ended(await answered(database, UsageQuery(old, recent, "hour", tenant_id="ten_a"))) == 2
