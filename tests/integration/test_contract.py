"""The contract step: what it removes, and which gateways it waits for."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from migrations import runner, stages
from tenants.directory.gateways import GatewayRegistry
from tenants.errors import Invalid
from tenants.storage.database import Database, create_sql_engine
from tenants.storage.release import ReleaseTooOld, this_release
from tests.support.commands import run_command

STALE_S = 10.0
RENAMED = f"""
import sqlalchemy as sa
from alembic import op
revision, down_revision, branch_labels, depends_on = "0027", "0026", None, None
NEEDS_RELEASE = "{this_release()}"

def upgrade():
    op.add_column("model_aliases", sa.Column("leads_to", sa.String(9), server_default="x"))

def downgrade():
    op.drop_column("model_aliases", "leads_to")

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


def columns(url: str) -> set[str]:
    engine = create_sql_engine(url, writing=False)
    try:
        return {column["name"] for column in inspect(engine).get_columns("model_aliases")}
    finally:
        engine.dispose()


async def beat(database: Database, gateway_id: str, release: str) -> None:
    registry = GatewayRegistry(database)
    registry._release = release
    await registry.beat(gateway_id, "there:1", frozenset())


async def test_it_waits_for_older_gateways_and_none_serves_after_it(
    database_url: str, made_up: Path, tmp_path: Path
) -> None:
    database = Database(database_url)
    for gateway_id, release in (("old", "0.0.9"), ("older", ""), ("new", this_release())):
        await beat(database, gateway_id, release)
    runner.upgrade(database_url)
    with pytest.raises(Invalid, match=r"older gateways serve: old \(0\.0\.9\), older \(of an unnamed"):
        runner.contract(database_url, STALE_S)
    await GatewayRegistry(database).forget("older")
    at = ("--database-url", database_url, "--data-dir", str(tmp_path / "data"), "--json")
    refused = run_command("db", "upgrade", "--contract", *at)
    assert refused.exit_code == 1
    assert "old (0.0.9); replace them first" in refused.stderr
    assert runner.schema(database_url) == stages.Schema("0027", None, None)
    assert columns(database_url) >= {"means", "leads_to"}
    runner.downgrade(database_url, "0026")
    await GatewayRegistry(database).forget("old")
    answers = [json.loads(run_command("db", "upgrade", "--contract", *at).stdout) for _ in range(2)]
    expected = {"revision": "0027", "contracted": "0027", "oldest_release": this_release()}
    assert answers == [{"head": "0027", "is_current": True, **expected}] * 2
    assert "; no contract step is pending" in run_command("db", "upgrade", "--contract", *at[:-1]).stdout
    assert "means" not in columns(database_url)
    for release in ("0.0.9", ""):
        with pytest.raises(ReleaseTooOld, match=f"needs Fairgate {this_release()} or newer"):
            await beat(database, "late", release)
    assert [row.gateway_id for row in await GatewayRegistry(database).seen()] == ["new"]
    for revision in ("0026", "base", "-1"):
        with pytest.raises(Invalid, match=r"0027 is contracted: .* restore a backup"):
            runner.downgrade(database_url, revision)
    await database.close()


def test_a_program_that_could_not_serve_after_it_does_not_run_it(sqlite_url: str, made_up: Path) -> None:
    made_up.write_text(RENAMED.replace(f'"{this_release()}"', '"999.1"'))
    runner.upgrade(sqlite_url)
    with pytest.raises(Invalid, match=r"0027 needs Fairgate 999\.1, and this is"):
        runner.contract(sqlite_url, STALE_S)
    assert runner.schema(sqlite_url).oldest_release is None


async def test_an_older_gateway_that_starts_meanwhile_is_found_or_refused(
    postgres_url: str, made_up: Path
) -> None:
    runner.upgrade(postgres_url)
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
    with engine.begin() as forgetting:
        forgetting.execute(text("DELETE FROM settings WHERE name = 'schema.oldest_release'"))
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
