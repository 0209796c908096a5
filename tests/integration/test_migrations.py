"""Migrations up and down on SQLite and PostgreSQL; the resulting schema against the tables' metadata."""

from __future__ import annotations

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, text
from sqlalchemy.exc import DBAPIError

from migrations import runner
from tenants.errors import DatabaseUnavailable, Invalid, SchemaMissing
from tenants.release import this_release
from tenants.storage.database import create_sql_engine, open_database
from tenants.storage.release import OLDEST_RELEASE
from tenants.storage.tables import metadata
from tenants.storage.tables import settings as settings_table
from tests.support.services import free_port


def set_revision(url: str, revision: str) -> None:
    engine = create_sql_engine(url, writing=True)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
    engine.dispose()


def tables(url: str) -> set[str]:
    engine = create_sql_engine(url, writing=False)
    try:
        return set(inspect(engine).get_table_names())
    finally:
        engine.dispose()


def test_up_down_and_up_again(empty_database_url: str) -> None:
    assert runner.current(empty_database_url) is None
    runner.upgrade(empty_database_url)
    assert runner.current(empty_database_url) == runner.head()
    assert tables(empty_database_url) == set(metadata.tables) | {"alembic_version"}
    runner.downgrade(empty_database_url, "base")
    assert runner.current(empty_database_url) is None
    assert tables(empty_database_url) == {"alembic_version"}
    runner.upgrade(empty_database_url)
    assert runner.current(empty_database_url) == runner.head()


def test_migrations_and_models_do_not_drift(empty_database_url: str) -> None:
    runner.upgrade(empty_database_url)
    engine = create_sql_engine(empty_database_url, writing=False)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, metadata) == []
    engine.dispose()


def test_on_sqlite_an_entry_of_the_audit_is_bytes(sqlite_url: str) -> None:
    engine = create_sql_engine(sqlite_url, writing=True)
    row = "INSERT INTO audit (seq, at_us, actor, origin, action, target, entry)"
    row += " VALUES (2, 1, 'a', 'o', 'x', 't', '{}')"
    with pytest.raises(DBAPIError, match="entry_is_blob"), engine.begin() as connection:
        connection.exec_driver_sql(row)
    engine.dispose()


def test_concurrent_upgrades_upgrade_once(empty_database_url: str) -> None:
    failures: list[BaseException] = []

    def upgrade() -> None:
        try:
            runner.upgrade(empty_database_url)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=upgrade) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert runner.current(empty_database_url) == runner.head()


def test_a_new_file_that_another_process_writes_is_waited_for(tmp_path: Path) -> None:
    """SQLite itself would not wait: a new file has no write-ahead log yet, and one that is written gets
    none."""
    path = tmp_path / "new.db"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("CREATE TABLE theirs (id INTEGER)")
    other.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(1) as pool:
        upgraded = pool.submit(runner.upgrade, f"sqlite:///{path}")
        with pytest.raises(TimeoutError):
            upgraded.result(timeout=0.5)
        other.execute("COMMIT")
        upgraded.result()
    other.close()


def test_what_is_append_only_cannot_be_changed(database_url: str) -> None:
    columns = {
        "counter_sets": "counter",
        "prices": "model",
        "audit_tiles": "root",
        "audit_checkpoints": "note",
    }
    rows = {
        "ledger": "INSERT INTO ledger (request_id, kind, tenant_id, project_id, key_id, gateway_id, tier,"
        " model, input_tokens, output_tokens, cost_nanousd, requests, outcome, at_us, detail)"
        " VALUES ('r', 'reserve', 't', 'p', 'k', 'g', 'batch', 'm', 1, 1, 1, 1, '', 1, '{}')",
        "counter_sets": "INSERT INTO counter_sets (gateway_id, set_id, counter) VALUES ('g', 's', 'c')",
        "prices": "INSERT INTO prices (version, model, tier, input_nanousd, cached_input_nanousd,"
        " output_nanousd, multiplier, input_weight, cached_input_weight, output_weight, reasoning_weight,"
        " created_us) VALUES (1, 'm', 'batch', 1, 1, 1, 1, 1, 1, 1, 1, 1)",
        "audit": "INSERT INTO audit (seq, at_us, actor, origin, action, target, entry)"
        " VALUES (0, 1, 'a', 'o', 'x', 't', :entry)",
        "audit_tiles": "INSERT INTO audit_tiles (number, root) VALUES (0, '')",
        "audit_checkpoints": "INSERT INTO audit_checkpoints (size, note, at_us) VALUES (1, 'n', 1)",
    }
    engine = create_sql_engine(database_url, writing=True)
    for table, row in rows.items():
        column = columns.get(table, "tenant_id")
        with engine.begin() as connection:
            connection.execute(text(row), {"entry": b""} if table == "audit" else {})
        for change in (f"UPDATE {table} SET {column} = {column}", f"DELETE FROM {table}"):
            with pytest.raises(DBAPIError, match="append-only"), engine.begin() as connection:
                connection.execute(text(change))
    engine.dispose()


def test_a_database_of_a_later_release_is_served_unless_it_needs_a_newer_one(database_url: str) -> None:
    set_revision(database_url, "9999")
    runner.prepare(database_url)
    engine = create_sql_engine(database_url, writing=True)
    for oldest, serves in ((this_release(), True), ("999.1", False)):
        with engine.begin() as connection:
            connection.execute(settings_table.delete().where(settings_table.c.name == OLDEST_RELEASE))
            connection.execute(settings_table.insert().values(name=OLDEST_RELEASE, value=oldest))
        if serves:
            runner.prepare(database_url)
        else:
            with pytest.raises(Invalid, match=r"needs Fairgate 999\.1 or newer, and this is \d"):
                runner.prepare(database_url)
    engine.dispose()
    assert runner.current(database_url) == "9999"


def test_a_change_of_the_schema_that_waits_lets_the_gateways_write(postgres_url: str) -> None:
    runner.downgrade(postgres_url, "0025")
    engine = create_sql_engine(postgres_url, writing=True)
    gateway = create_sql_engine(postgres_url, writing=True)
    waits = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'gateways'::regclass")
    with ThreadPoolExecutor(1) as pool:
        with engine.begin() as reader:
            reader.execute(text("SELECT count(*) FROM gateways"))
            upgraded = pool.submit(runner.upgrade, postgres_url)
            while not reader.execute(waits).scalar_one():
                assert not upgraded.done()
            with gateway.begin() as writer:
                writer.execute(text("SET LOCAL lock_timeout = '20s'"))
                writer.execute(text("UPDATE gateways SET adopter = ''"))
            assert not upgraded.done()
        upgraded.result()
    engine.dispose()
    gateway.dispose()
    assert runner.current(postgres_url) == runner.head()


def test_an_unknown_revision_is_named(empty_database_url: str) -> None:
    with pytest.raises(Invalid, match="'0999'"):
        runner.upgrade(empty_database_url, "0999")
    assert runner.current(empty_database_url) is None


async def test_a_database_without_schema_says_what_to_do(empty_database_url: str) -> None:
    database = open_database(empty_database_url)
    with pytest.raises(SchemaMissing, match="fairgate db upgrade"):
        await database.read(lambda connection: connection.execute(text("SELECT * FROM tenants")).all())
    with pytest.raises(SchemaMissing, match="fairgate db upgrade"):
        await database.write(lambda connection: connection.execute(text("DELETE FROM tenants")).rowcount)
    await database.close()


def test_an_unreachable_database_is_unavailable_and_names_no_password(tmp_path: Path) -> None:
    for url in (
        f"postgresql://someone:hunter2@127.0.0.1:{free_port()}/fairgate",
        f"sqlite:///{tmp_path}",  # a directory
    ):
        with pytest.raises(DatabaseUnavailable) as caught:
            runner.upgrade(url)
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "fairgate.db", "mysql://x/y", "sqlite://", "sqlite:///:memory:"])
def test_a_url_that_cannot_be_used_is_refused_by_name(url: str) -> None:
    with pytest.raises(Invalid, match="database_url"):
        runner.current(url)


@pytest.mark.parametrize(
    ("revision", "message"),
    [
        ("9999", r"its schema 9999 is of a later release, and this program knows \d+: use that release"),
        ("0015", "its schema 0015 is older than 0021, .*: use an empty database, or upgrade it before"),
    ],
)
def test_a_newer_or_too_old_database_is_not_touched(
    sqlite_url: str, postgres_url: str, revision: str, message: str
) -> None:
    for url in (sqlite_url, postgres_url):
        set_revision(url, revision)
        for move in (runner.upgrade, lambda url: runner.downgrade(url, "base")):
            with pytest.raises(Invalid, match=message):
                move(url)
        assert runner.current(url) == revision
