"""Migrations up and down on SQLite and PostgreSQL; the resulting schema against the tables' metadata."""

from __future__ import annotations

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from pymerkle import InmemoryTree
from sqlalchemy import inspect, select, text
from sqlalchemy.exc import DBAPIError

from migrations import runner
from tenants.audit import entry, store
from tenants.errors import DatabaseUnavailable, Invalid, SchemaMissing
from tenants.storage.database import create_sql_engine, open_database
from tenants.storage.tables import audit, audit_tiles, metadata
from tests.support.services import free_port, libpq_url


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


def test_limits_and_their_overrides_survive_the_way_up_and_down(empty_database_url: str) -> None:
    runner.upgrade(empty_database_url, "0001")
    engine = create_sql_engine(empty_database_url, writing=True)
    limit = (
        "INSERT INTO limits (id, tenant_id, kind, subject_id, meter, shape, tier, time_zone, amount, mode,"
    )
    limit += " created_us{}) VALUES ('{}', {}, '{}', 't', 'requests', 'day', '', 'UTC', 5, 'hard', 1{})"
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO tenants (id, name, status, weight, default_tier, tiers, created_us, revision)"
                " VALUES ('t', 't', 'active', 1, 'batch', '[]', 1, 1)"
            )
        )
        connection.execute(text(limit.format("", "old", "'t'", "tenant", "")))
        connection.execute(text("INSERT INTO limit_overrides VALUES ('old', 9, NULL, 7, 'why', 1)"))
    runner.upgrade(empty_database_url)
    with engine.begin() as connection:
        more = ", model, above_tokens, end_user"
        connection.execute(text(limit.format(more, "all", "NULL", "platform", ", '', 0, ''")))
        connection.execute(text(limit.format(more, "model", "'t'", "tenant", ", 'm', 0, ''")))
        connection.execute(text("INSERT INTO limit_overrides VALUES ('model', 9, NULL, 7, 'why', 1)"))
    runner.downgrade(empty_database_url, "0001")
    with engine.begin() as connection:
        assert connection.execute(text("SELECT id, tenant_id, amount FROM limits")).all() == [("old", "t", 5)]
        kept = connection.execute(text("SELECT limit_id, amount, reason FROM limit_overrides")).all()
        assert kept == [("old", 9, "why")]
    engine.dispose()
    runner.upgrade(empty_database_url)


def test_audit_rows_that_are_there_become_the_first_leaves(empty_database_url: str) -> None:
    runner.upgrade(empty_database_url, "0015")
    engine = create_sql_engine(empty_database_url, writing=True)
    old = "INSERT INTO audit (id, at_us, actor, origin, action, target, tenant_id, before, after) VALUES"
    rows = [
        # Ids have gaps, and are not in the order of the instants.
        (2 * number + 5, 9_000 - number, "cli:zoë", "", "tenant.update", "t", None, '{"weight": 1.0}', after)
        for number, after in enumerate(
            ("{}", '{"a": [1, 2.5, true, null], "é": "\\u0000"}', "null", *["{}"] * 600)
        )
    ]
    with engine.begin() as connection:
        for row in rows:
            connection.exec_driver_sql(
                f"{old} ({', '.join(['?' if connection.dialect.name == 'sqlite' else '%s'] * 9)})", row
            )
    runner.upgrade(empty_database_url)
    theirs = InmemoryTree(algorithm="sha256")
    with engine.begin() as connection:
        for seq, row in enumerate(connection.execute(select(audit).order_by(audit.c.seq)).mappings()):
            said = entry.decode(row["entry"])
            fields = {name: row[name] for name in entry.FIELDS}
            assert entry.first_difference(seq, fields, said) is None
            assert (row["at_us"], row["actor"]) == (9_000 - seq, "cli:zoë")
            theirs.append_entry(row["entry"])
        assert theirs.get_size() == len(rows)
        assert store.head(connection).root == theirs.get_root()
        tiles = list(connection.execute(select(audit_tiles.c.root).order_by(audit_tiles.c.number)).scalars())
        assert tiles == [theirs._get_root(0, 256), theirs._get_root(256, 512)]
        row = store.LogEntry(1, "a", "", "tenant.create", "t")
        assert store.append(connection, row) == len(rows)
    runner.downgrade(empty_database_url, "0015")
    with engine.begin() as connection:
        kept = connection.execute(text("SELECT at_us, target FROM audit ORDER BY id")).all()
        assert kept == [*((row[1], "t") for row in rows), (1, "t")]
        connection.exec_driver_sql(
            "INSERT INTO audit (at_us, actor, origin, action, target) VALUES (7, 'a', '', 'x', 't')"
        )
        newest = connection.execute(text("SELECT at_us FROM audit ORDER BY id DESC LIMIT 1")).scalar()
        assert newest == 7
    engine.dispose()


def test_on_sqlite_an_entry_that_is_text_becomes_bytes_and_no_other_comes(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/fairgate.db"
    insert = "INSERT INTO audit (seq, at_us, actor, origin, action, target, after, entry) VALUES"
    row = insert + " ({}, 1, 'a', 'o', 'x', 't', 'null', {})"
    engine = create_sql_engine(url, writing=True)

    def lies() -> list[tuple[object, ...]]:
        query = "SELECT seq, after, CAST(entry AS BLOB), typeof(entry), request_id FROM audit ORDER BY seq"
        with engine.connect() as connection:
            return [tuple(found) for found in connection.execute(text(query))]

    runner.upgrade(url, "0020")
    with engine.begin() as connection:
        connection.exec_driver_sql(row.format(0, "x'7b7d'"))
        connection.exec_driver_sql(row.format(1, "'{\"é\"}'"))
    for revision in ("head", "0020", "head"):
        (runner.downgrade if revision == "0020" else runner.upgrade)(url, revision)
        assert lies() == [(0, "null", b"{}", "blob", None), (1, "null", '{"é"}'.encode(), "blob", None)]
    with pytest.raises(DBAPIError, match="entry_is_blob"), engine.begin() as connection:
        connection.exec_driver_sql(row.format(2, "'{}'"))
    with pytest.raises(DBAPIError, match="append-only"), engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM audit")
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


@pytest.mark.parametrize(
    "table", ["ledger", "counter_sets", "audit", "audit_tiles", "audit_checkpoints", "prices"]
)
@pytest.mark.parametrize("change", ["UPDATE {} SET {} = {}", "DELETE FROM {}"])
def test_what_is_append_only_cannot_be_changed(database_url: str, table: str, change: str) -> None:
    column = {
        "counter_sets": "counter",
        "prices": "model",
        "audit_tiles": "root",
        "audit_checkpoints": "note",
    }.get(table, "tenant_id")
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
    with engine.begin() as connection:
        given = {"entry": b""} if table == "audit" else {}
        connection.execute(text(rows[table]), given)
    with pytest.raises(DBAPIError, match="append-only"), engine.begin() as connection:
        connection.execute(text(change.format(table, column, column)))
    engine.dispose()


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


def test_a_newer_database_is_not_touched(sqlite_url: str, postgres_url: str) -> None:
    with sqlite3.connect(sqlite_url.removeprefix("sqlite:///")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with psycopg.connect(libpq_url(postgres_url)) as other:
        other.execute("UPDATE alembic_version SET version_num = '9999'")
    for url in (sqlite_url, postgres_url):
        with pytest.raises(Invalid, match="newer"):
            runner.upgrade(url)
        assert runner.current(url) == "9999"
