"""PostgreSQL: the role of a running server reads and adds, and cannot change what was written."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner
from psycopg import sql

from migrations import runner
from ops.cli.main import cli
from ops.serving import audit_key
from tenants.audit.log import AuditLog
from tenants.errors import Invalid
from tenants.ledger.digests import LedgerDigests, verify_digests
from tenants.storage.database import open_database
from tenants.storage.server_role import APPEND_ONLY
from tenants.usage.verify import usage_problems
from tests.support.gateway_app import gateway_app
from tests.support.services import libpq_url
from tests.support.usage import fold_all, traffic, write

PASSWORD = "a-password"


def execute(url: str, *statements: str | sql.Composed) -> None:
    with psycopg.connect(libpq_url(url), autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement if isinstance(statement, sql.Composed) else statement.encode())


@pytest.fixture
def role(postgres_url: str) -> Iterator[str]:
    """A role that may log in, and no more."""
    name = f"Fairgate server {uuid.uuid4().hex[:8]}"
    made = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(name), sql.Literal(PASSWORD))
    execute(postgres_url, made)
    yield name
    for statement in ("DROP OWNED BY {} CASCADE", "DROP ROLE {}"):
        execute(postgres_url, sql.SQL(statement).format(sql.Identifier(name)))


def url_of(url: str, role: str) -> str:
    """The same database as this role."""
    quoted = role.replace(" ", "%20")
    return re.sub(r"//[^@/]*@", f"//{quoted}:{PASSWORD}@", url)


def test_the_role_changes_nothing_that_is_append_only(postgres_url: str, role: str) -> None:
    runner.grant(postgres_url, role)
    server = url_of(postgres_url, role)
    execute(
        server,
        "INSERT INTO audit (seq, at_us, actor, origin, action, target, entry)"
        " VALUES (0, 1, 'a', 'o', 'x', 't', '')",
        "INSERT INTO audit_checkpoints (size, note, at_us) VALUES (1, 'n', 1)",
        "UPDATE audit_head SET size = size",
    )
    refused = [
        statement
        for table in APPEND_ONLY
        for statement in (
            f"DELETE FROM {table}",
            f"TRUNCATE {table}",
            f"DROP TABLE {table}",
            f"ALTER TABLE {table} DISABLE TRIGGER USER",
            f"DROP TRIGGER {table}_append_only ON {table}",
            f"CREATE TRIGGER mine BEFORE INSERT ON {table} EXECUTE FUNCTION fairgate_append_only()",
            f"ALTER TABLE {table} OWNER TO CURRENT_USER",
        )
    ]
    refused += [
        "UPDATE audit SET actor = 'b'",
        "UPDATE ledger SET cost_nanousd = 0",
        "UPDATE audit_checkpoints SET note = 'm'",
        "UPDATE alembic_version SET version_num = '1'",
        "DELETE FROM audit_head",
        "INSERT INTO audit_head (id, size, frontier, root) VALUES (2, 0, '', '')",
        "SET session_replication_role = replica",
        "CREATE OR REPLACE FUNCTION fairgate_append_only() RETURNS trigger LANGUAGE plpgsql"
        " AS $$ BEGIN RETURN OLD; END $$",
        "DROP FUNCTION fairgate_append_only() CASCADE",
        "CREATE TABLE mine (id int)",
        "DROP SCHEMA public CASCADE",
    ]
    with psycopg.connect(libpq_url(server), autocommit=True) as connection:
        for statement in refused:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())


def test_every_append_only_table_is_guarded(postgres_url: str) -> None:
    query = "SELECT tgrelid::regclass::text FROM pg_trigger WHERE tgname LIKE '%_append_only'"
    with psycopg.connect(libpq_url(postgres_url)) as connection:
        assert {name for (name,) in connection.execute(query.encode())} == set(APPEND_ONLY)


async def test_a_server_runs_as_the_role(postgres_url: str, role: str, tmp_path: Path) -> None:
    runner.grant(postgres_url, role)
    server = url_of(postgres_url, role)
    runner.upgrade(server)  # as each start does: nothing is to be done
    assert runner.current(server) == runner.head()
    async with gateway_app(server, tmp_path / "home") as client:
        made = [
            await client.post("/admin/v1/tenants", json={"name": "acme"}),
            await client.post("/admin/v1/keys", json={"tenant": "acme", "scopes": ["inference"]}),
            await client.post(
                "/admin/v1/limits", json={"tenant": "acme", "meter": "requests", "window": "day", "amount": 5}
            ),
            await client.put(
                "/admin/v1/brake", json={"tier": "batch", "share": 0.5, "for_s": 60, "reason": "test"}
            ),
            await client.post("/admin/v1/ledger/verify"),
            await client.post("/admin/v1/usage/rebuild"),
        ]
        assert [each.status_code for each in made if each.status_code >= 400] == [], [
            each.text for each in made
        ]
        limit = made[2].json()
        removed = await client.delete(f"/admin/v1/limits/{limit['id']}")
        assert removed.status_code == 200, removed.text
        for path in ("status", "tenants", "audit", "usage?since=2026-01-01T00:00:00Z", "audit/log"):
            answered = await client.get(f"/admin/v1/{path}")
            assert answered.status_code in (200, 400), (path, answered.text)
    database = open_database(server)
    await write(database, traffic(30))
    await fold_all(database)
    assert await usage_problems(database) == []
    assert await LedgerDigests(database, lambda: 9e9, 0.0).close_due() is not None
    own = audit_key.read(tmp_path / "home")
    assert own is not None
    log = AuditLog(database, own)
    await log.make_checkpoint()
    await audit_key.change(tmp_path / "home", "cli:root", "cli", log)
    assert (await log.verify([own.public])).finding is None
    assert (await verify_digests(database)).finding is None
    await database.close()


def test_the_schema_is_the_owner_s(postgres_url: str, role: str) -> None:
    runner.grant(postgres_url, role)
    server = url_of(postgres_url, role)
    runner.downgrade(postgres_url, "base")
    with pytest.raises(Invalid, match="fairgate db upgrade"):
        runner.upgrade(server)
    with pytest.raises(Invalid, match=r"its schema is missing: run `fairgate db upgrade`"):
        runner.grant(postgres_url, role)


def test_a_role_that_can_do_more_is_refused(postgres_url: str, role: str) -> None:
    name = sql.Identifier(role)
    with psycopg.connect(libpq_url(postgres_url)) as connection:
        owner = str(connection.execute("SELECT current_user").fetchone()[0])  # type: ignore[index]
    cases = [
        ("ALTER ROLE {} CREATEROLE", "ALTER ROLE {} NOCREATEROLE", "may make roles"),
        ("ALTER ROLE {} SUPERUSER", "ALTER ROLE {} NOSUPERUSER", "is a superuser"),
        (
            "GRANT pg_write_all_data TO {}",
            "REVOKE pg_write_all_data FROM {}",
            "member of 'pg_write_all_data'",
        ),
        ("CREATE TABLE mine (id int); ALTER TABLE mine OWNER TO {}", "DROP TABLE mine -- {}", "owns tables"),
        (
            "GRANT DELETE ON audit TO PUBLIC -- {}",
            "REVOKE DELETE ON audit FROM PUBLIC -- {}",
            "still change audit",
        ),
    ]
    for before, after, message in cases:
        execute(postgres_url, sql.SQL(before).format(name))
        with pytest.raises(Invalid, match=message):
            runner.grant(postgres_url, role)
        execute(postgres_url, sql.SQL(after).format(name))
    execute(postgres_url, sql.SQL("GRANT {} TO {}").format(sql.Identifier(owner), name))
    with pytest.raises(Invalid, match="is a member of"):
        runner.grant(postgres_url, role)
    execute(postgres_url, sql.SQL("REVOKE {} FROM {}").format(sql.Identifier(owner), name))
    runner.grant(postgres_url, role)
    runner.grant(postgres_url, role)  # again: the same


@pytest.mark.parametrize("name", ["no such role", "x" * 64, ""])
def test_a_role_that_there_is_not_is_named(postgres_url: str, name: str) -> None:
    with pytest.raises(Invalid, match="role"):
        runner.grant(postgres_url, name)


def test_the_command_grants_and_says_what_it_did(postgres_url: str, role: str, tmp_path: Path) -> None:
    where = ["--database-url", postgres_url, "--data-dir", str(tmp_path)]
    done = CliRunner().invoke(cli, ["db", "grant", role, *where], prog_name="fairgate")
    assert done.exit_code == 0, done.output
    assert "audit" in done.output
    missing = CliRunner().invoke(cli, ["db", "grant", "nobody-at-all", *where], prog_name="fairgate")
    assert (missing.exit_code, "CREATE ROLE" in missing.output) == (1, True)
    embedded = CliRunner().invoke(cli, ["db", "upgrade", "--data-dir", str(tmp_path)], prog_name="fairgate")
    assert embedded.exit_code == 0, embedded.output
    sqlite = CliRunner().invoke(cli, ["db", "grant", role, "--data-dir", str(tmp_path)], prog_name="fairgate")
    assert (sqlite.exit_code, "only PostgreSQL has roles" in sqlite.output) == (1, True)
