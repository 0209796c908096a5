"""The contract step: what it removes, and which gateways it waits for."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from gateway.cluster.backfills import run_backfills
from migrations import runner, stages
from migrations.stages import Backfill
from ops.serving import doctor
from ops.serving.doctor import Finding
from ops.settings.settings import Settings
from tenants.directory.gateways import GatewayRegistry
from tenants.errors import Invalid
from tenants.release import this_release
from tenants.storage.database import Database, create_sql_engine
from tenants.storage.release import ReleaseTooOld
from tests.support.commands import run_command
from tests.support.server_process import Server, until
from tests.support.warm_command import fairgate

ROOT = Path(__file__).resolve().parents[2]
STALE_S = 10.0
UPSTREAM = {"name": "away", "url": "http://127.0.0.1:9/v1", "model": "m", "context_tokens": 64}
SERVE = ("--engine-serve", "no", "--upstreams", json.dumps([UPSTREAM]), "--gateway-stale", "3")
RENAMED = """
import sqlalchemy as sa
from alembic import op
revision, down_revision, branch_labels, depends_on = "0027", "0026", None, None
NEEDS_RELEASE = "0.1"

def upgrade():
    op.add_column("model_aliases", sa.Column("leads_to", sa.String(2000)))

def downgrade():
    op.drop_column("model_aliases", "leads_to")

def backfill(connection, limit):
    rows = "SELECT id FROM model_aliases WHERE leads_to IS NULL LIMIT :limit"
    fill = sa.text(f"UPDATE model_aliases SET leads_to = means WHERE id IN ({rows})")
    return connection.execute(fill, {"limit": limit}).rowcount

def contract():
    op.drop_column("model_aliases", "means")
"""


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A migration more than the program has: one column takes another's place."""
    folder = tmp_path / "versions"
    folder.mkdir()
    (folder / "0027_made_up.py").write_text(RENAMED)
    monkeypatch.setattr(runner, "VERSIONS", [*runner.VERSIONS, folder])
    return folder / "0027_made_up.py"


def run(url: str, statement: str, rows: list[dict[str, str]] | None = None) -> list[Any]:
    """In a transaction of its own; the first column of what it returns."""
    engine = create_sql_engine(url, writing=True)
    try:
        with engine.begin() as connection:
            done = connection.execute(text(statement), rows or {})
            return list(done.scalars()) if done.returns_rows else []
    finally:
        engine.dispose()


def add_aliases(url: str, numbers: range) -> None:
    row = "INSERT INTO model_aliases (id, name, means, max_price) VALUES (:id, :id, 'm', 1)"
    run(url, row, [{"id": f"a{number}"} for number in numbers])


async def fill(url: str) -> None:
    await run_backfills(partial(runner.backfill, url))


async def beat(database: Database, gateway_id: str, release: str) -> None:
    registry = GatewayRegistry(database)
    registry._release = release
    await registry.beat(gateway_id, "there:1", frozenset())


async def test_it_waits_for_older_gateways_and_none_serves_after_it(
    database_url: str, made_up: Path, tmp_path: Path
) -> None:
    add_aliases(database_url, range(1))
    database = Database(database_url)
    for gateway_id, release in (("old", "0.0.9"), ("older", ""), ("new", this_release())):
        await beat(database, gateway_id, release)
    runner.upgrade(database_url)
    await fill(database_url)
    with pytest.raises(Invalid, match=r"older gateways serve: old \(0\.0\.9\), older \(of an unnamed"):
        runner.contract(database_url, STALE_S)
    await GatewayRegistry(database).forget("older")
    at = ("--database-url", database_url, "--data-dir", str(tmp_path / "data"), "--json")
    refused = run_command("db", "upgrade", "--contract", *at)
    assert refused.exit_code == 1
    assert "old (0.0.9); replace them first" in refused.stderr
    assert runner.schema(database_url) == stages.Schema("0027", None, None, (Backfill("0027", 1, True),))
    assert run(database_url, "SELECT means FROM model_aliases") == ["m"]
    runner.downgrade(database_url, "0026")
    await GatewayRegistry(database).forget("old")
    unfilled = run_command("db", "upgrade", "--contract", *at).stderr
    assert "backfill 0027: 0 rows so far; a running gateway goes on" in unfilled
    await fill(database_url)
    answers = [json.loads(run_command("db", "upgrade", "--contract", *at).stdout) for _ in range(2)]
    expected = {"revision": "0027", "contracted": "0027", "oldest_release": "0.1"}
    expected |= {"backfills": [{"revision": "0027", "rows": 1, "is_done": True}]}
    assert answers == [{"head": "0027", "is_current": True, **expected}] * 2
    assert "; no contract step is pending" in run_command("db", "upgrade", "--contract", *at[:-1]).stdout
    with pytest.raises(DBAPIError, match="means"):
        run(database_url, "SELECT means FROM model_aliases")
    for release in ("0.0.9", ""):
        with pytest.raises(ReleaseTooOld, match=r"needs Fairgate 0\.1 or newer"):
            await beat(database, "late", release)
    assert [row.gateway_id for row in await GatewayRegistry(database).seen()] == ["new"]
    for revision in ("0026", "base", "-1"):
        with pytest.raises(Invalid, match=r"0027 is contracted: .* restore a backup"):
            runner.downgrade(database_url, revision)
    await database.close()


def test_a_program_that_could_not_serve_after_it_does_not_run_it(sqlite_url: str, made_up: Path) -> None:
    made_up.write_text(RENAMED.replace('"0.1"', '"999.1"'))
    runner.upgrade(sqlite_url)
    asyncio.run(fill(sqlite_url))
    with pytest.raises(Invalid, match=r"0027 needs Fairgate 999\.1, and this is"):
        runner.contract(sqlite_url, STALE_S)
    assert runner.schema(sqlite_url).oldest_release is None


async def test_an_older_gateway_that_starts_meanwhile_is_found_or_refused(
    postgres_url: str, made_up: Path
) -> None:
    runner.upgrade(postgres_url)
    await fill(postgres_url)
    database = Database(postgres_url)
    engine = create_sql_engine(postgres_url, writing=True, pool_size=2)
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'gateways'::regclass")
    script = ScriptDirectory.from_config(runner._config())
    with engine.connect() as looking, engine.begin() as closing:
        stages.close_to_older(closing, script, STALE_S)
        late = asyncio.create_task(beat(database, "late", "0.0.9"))
        while not looking.execute(waiting).scalar_one():
            assert not late.done()
            await asyncio.sleep(0)
    with pytest.raises(ReleaseTooOld):
        await late
    run(postgres_url, "DELETE FROM settings WHERE name = 'schema.oldest_release'")
    with engine.connect() as looking, engine.connect() as starting, ThreadPoolExecutor(1) as pool:
        starting.execute(
            text(
                "INSERT INTO gateways (id, started_us, heartbeat_us, address, engines, adopter)"
                " VALUES ('soon', 0, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, '', '[]', '')"
            )
        )
        contracting = pool.submit(runner.contract, postgres_url, STALE_S)
        while not looking.execute(waiting).scalar_one():
            assert not contracting.done()
        starting.commit()
        with pytest.raises(Invalid, match=r"soon \(of an unnamed release\)"):
            contracting.result()
    engine.dispose()
    await database.close()


async def test_a_backfill_goes_on_in_batches_and_rows_of_older_gateways_are_filled_before_the_contract(
    database_url: str, made_up: Path
) -> None:
    add_aliases(database_url, range(2_500))
    runner.upgrade(database_url)
    assert runner.backfill(database_url) == "filled"
    assert str(runner.schema(database_url).backfills[0]) == "backfill 0027: 1,000 rows so far"
    with pytest.raises(Invalid, match="1,000 rows so far; a running gateway"):
        runner.contract(database_url, STALE_S)
    await fill(database_url)
    assert runner.schema(database_url).backfills == (Backfill("0027", 2_500, True),)
    add_aliases(database_url, range(2_500, 4_000))
    assert runner.contract(database_url, STALE_S) == ["0027"]
    assert run(database_url, "SELECT count(leads_to) FROM model_aliases") == [4_000]


def test_one_process_at_a_time_fills(postgres_url: str, made_up: Path) -> None:
    runner.upgrade(postgres_url)
    engine = create_sql_engine(postgres_url, writing=True)
    with engine.begin() as other:
        other.execute(text(f"SELECT pg_advisory_xact_lock({runner._ADVISORY_LOCK})"))
        assert runner.backfill(postgres_url) == "busy"
    assert runner.backfill(postgres_url) == "filled"
    engine.dispose()


@pytest.mark.long
def test_a_server_of_the_release_before_goes_on_until_the_database_needs_a_newer_one(
    sqlite_url: str, tmp_path: Path
) -> None:
    run(sqlite_url, "UPDATE alembic_version SET version_num = '9999'")
    at = ("--data-dir", str(tmp_path / "data"), "--database-url", sqlite_url)
    serves = "revision 9999 (of a later release: this program knows "
    needs = "its schema needs Fairgate 999.1 or newer, and this is"
    server = Server(tmp_path / "data", tmp_path, [*SERVE, "--database-url", sqlite_url])
    server.start()
    try:
        assert serves in run_command("db", "current", *at).stdout
        for act in (["upgrade"], ["grant", "role"]):
            said = run_command("db", *act, *at).stderr
            assert "its schema 9999 is of a later release, and this program knows" in said
        found = database_check(sqlite_url)
        assert (found.ok, found.detail[-31:]) == (True, "schema 9999, of a later release")
        run(sqlite_url, "INSERT INTO settings VALUES ('schema.oldest_release', '999.1')")
        assert server.process is not None
        assert server.process.wait(30) == 1
        assert needs in server.log()
    finally:
        server.stop()
    again = fairgate("serve", "--port", "0", *SERVE, *at)
    assert (again.returncode, needs in again.stderr.splitlines()[-1]) == (1, True)
    found = database_check(sqlite_url)
    assert needs in found.detail
    assert (found.ok, found.advice) == (False, "install a newer release")
    assert ", served by 999.1 and newer" in run_command("db", "current", *at).stdout


@pytest.mark.long
def test_a_server_of_the_next_release_fills_while_it_serves(sqlite_url: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "migrations", tmp_path / "next/migrations")
    (tmp_path / "next/migrations/versions/0027_made_up.py").write_text(RENAMED)
    add_aliases(sqlite_url, range(3))
    command = [sys.executable, "-m", "ops.cli.main", "serve", "--json", "--port", "0", *SERVE]
    command += ["--data-dir", str(tmp_path / "data"), "--database-url", sqlite_url]
    with subprocess.Popen(
        command, cwd=tmp_path / "next", env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            until(lambda: run(sqlite_url, "SELECT 1 FROM settings WHERE value = '3 done'"))
        finally:
            process.terminate()


def database_check(url: str) -> Finding:
    return asyncio.run(doctor._database(Settings(database_url=url)))
