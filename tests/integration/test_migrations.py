"""Migrations up and down on SQLite and PostgreSQL; the resulting schema against the tables' metadata."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, text
from sqlalchemy.exc import DBAPIError

from migrations import runner
from tenants.errors import DatabaseUnavailable, Invalid, SchemaMissing
from tenants.storage.database import create_sql_engine, open_database
from tenants.storage.tables import metadata
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


@pytest.mark.parametrize("table", ["ledger", "counter_sets", "audit", "prices"])
@pytest.mark.parametrize("change", ["UPDATE {} SET {} = {}", "DELETE FROM {}"])
def test_what_is_append_only_cannot_be_changed(database_url: str, table: str, change: str) -> None:
    column = {"counter_sets": "counter", "prices": "model"}.get(table, "tenant_id")
    rows = {
        "ledger": "INSERT INTO ledger (request_id, kind, tenant_id, project_id, key_id, gateway_id, tier,"
        " model, input_tokens, output_tokens, cost_nanousd, requests, outcome, at_us, detail)"
        " VALUES ('r', 'reserve', 't', 'p', 'k', 'g', 'batch', 'm', 1, 1, 1, 1, '', 1, '{}')",
        "counter_sets": "INSERT INTO counter_sets (gateway_id, set_id, counter) VALUES ('g', 's', 'c')",
        "prices": "INSERT INTO prices (version, model, tier, input_nanousd, cached_input_nanousd,"
        " output_nanousd, multiplier, input_weight, cached_input_weight, output_weight, reasoning_weight,"
        " created_us) VALUES (1, 'm', 'batch', 1, 1, 1, 1, 1, 1, 1, 1, 1)",
        "audit": "INSERT INTO audit (at_us, actor, origin, action, target) VALUES (1, 'a', 'o', 'x', 't')",
    }
    engine = create_sql_engine(database_url, writing=True)
    with engine.begin() as connection:
        connection.execute(text(rows[table]))
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
