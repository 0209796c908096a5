"""`fairgate backup`: what is copied, what a change of it is called; the audit after a restore."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyrage
import pytest
from click.testing import CliRunner, Result

from ops.cli.main import cli
from ops.recovery.manifest import Manifest, hash_of
from ops.serving import audit_key, datadir
from ops.serving.datadir import private_file
from tenants.audit.log import AuditLog
from tenants.audit.note import PublicKey, SigningKey
from tenants.directory.gateways import GatewayRegistry
from tenants.outbox.figures import backup_us
from tenants.storage.database import open_database
from tests.support import services, small_disk
from tests.support.server_process import ROOT


@pytest.fixture
def home(sqlite_url: str, tmp_path: Path) -> Path:
    """A data directory whose database is there."""
    assert (tmp_path / "fairgate.db").exists()
    (tmp_path / "pepper").write_text("p" * 48 + "\n")
    return tmp_path


def run(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, [*arguments, "--data-dir", str(home)], prog_name="fairgate")


def told(home: Path, *arguments: str) -> Any:
    result = run(home, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


async def signed(home: Path, url: str = "") -> SigningKey:
    database = open_database(url or f"sqlite:///{home / 'fairgate.db'}")
    try:
        own = await audit_key.own(home, AuditLog(database))
        assert own is not None
        await AuditLog(database, own).make_checkpoint()
    finally:
        await database.close()
    return own


@pytest.fixture
def key(home: Path) -> SigningKey:
    """The audit is signed with it."""
    return asyncio.run(signed(home))


def age(tmp_path: Path) -> tuple[str, Path]:
    """A recipient, and the file of its key as age-keygen writes it."""
    identity = pyrage.x25519.Identity.generate()
    file = tmp_path / "age.txt"
    file.write_text(f"# created: today\n# public key: {identity.to_public()}\n{identity}\n")
    return str(identity.to_public()), file


def test_what_was_restored_is_the_instant_of_the_backup_and_either_key_checks_the_audit(
    home: Path, key: SigningKey, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("elsewhere")
    recipient, identity = age(place)
    copy, new_home = place / "copy", place / "new"
    (home / "engine-server.engine-1.keys").write_text("k\n")
    run(home, "tenant", "create", "acme")
    made = told(home, "backup", str(copy), "--age", recipient)
    run(home, "tenant", "create", "later")
    witness = place / "kept.txt"
    witness.write_text(told(home, "audit", "checkpoint")["note"])
    seen = int(witness.read_text().split("\n")[1])

    done = told(
        new_home,
        *("restore", str(copy), "--identity", str(identity), "--checkpoint", str(witness)),
    )

    assert [each["name"] for each in told(new_home, "tenant", "list")] == ["acme"]
    for name in ("pepper", "engine-server.engine-1.keys"):
        assert (new_home / name).read_text() == (home / name).read_text()
    assert (new_home / "pepper").stat().st_mode & 0o777 == 0o600
    assert done["lost_rows"] == {"first": made["audit_size"], "last": seen - 1}
    assert (done["before"], done["size"]) == (str(key.public), made["audit_size"])
    assert PublicKey.parse(done["public_key"]).name != key.name
    for known in (done["public_key"], done["before"]):
        assert told(new_home, "audit", "verify", "--public-key", known)["finding"] is None
    exported = place / "audit.jsonl"
    run(new_home, "audit", "export", "--output", str(exported))
    assert told(new_home, "audit", "verify", "--export", str(exported), "--public-key", done["before"])["ok"]
    # The log goes on, by the new key alone.
    run(new_home, "tenant", "create", "newer")
    assert told(new_home, "audit", "checkpoint")["note"].startswith(PublicKey.parse(done["public_key"]).name)
    assert told(new_home, "audit", "verify", "--public-key", str(key.public))["ok"]
    shown = told(new_home, "audit", "list")["data"]
    [row] = [each for each in shown if each["action"] == "audit.restore"]
    assert row["after"]["backup_at"] == made["at"]
    assert "backup.create" not in [each["action"] for each in shown]
    [noted] = [each for each in told(home, "audit", "list")["data"] if each["action"] == "backup.create"]
    assert noted["after"]["audit_size"] == made["audit_size"]


def test_a_backup_that_failed_is_not_the_newest(
    home: Path, key: SigningKey, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("elsewhere")
    told(home, "tenant", "create", "acme")

    def newest() -> int | None:
        async def read() -> int | None:
            database = open_database(f"sqlite:///{home / 'fairgate.db'}")
            try:
                return await database.read(backup_us)
            finally:
                await database.close()

        return asyncio.run(read())

    first_act = newest()
    too_long_for_sqlite = place / ("x" * 200) / ("x" * 200) / ("x" * 200)
    assert run(home, "backup", str(too_long_for_sqlite), "--no-secrets").exit_code == 1
    assert newest() == first_act
    assert first_act is not None
    made = told(home, "backup", str(place / "copy"), "--no-secrets")
    at_us = newest()
    assert at_us is not None
    assert first_act < at_us
    assert datetime.fromtimestamp(at_us // 1_000_000, UTC).isoformat() == made["at"]


def test_secrets_that_are_kept_elsewhere_are_given_by_hand(
    home: Path, key: SigningKey, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("elsewhere")
    copy = place / "copy"
    assert run(home, "backup", str(copy)).exit_code == 2
    told(home, "backup", str(copy), "--no-secrets")
    assert sorted(file.name for file in copy.iterdir()) == ["fairgate.db", "manifest.json"]
    refused = run(place / "new", "restore", str(copy))
    assert "give --secrets" in refused.output
    other = place / "other"
    other.mkdir()
    private_file(other / "audit-key", SigningKey(key.name, bytes(32)).to_secret_text())
    refused = run(place / "new", "restore", str(copy), "--secrets", str(other))
    assert "the secrets lack the audit-key" in refused.output
    assert not (place / "new").exists()
    told(place / "new", "restore", str(copy), "--secrets", str(home))
    assert (place / "new" / "pepper").exists()
    refused = run(place / "new", "restore", str(copy), "--secrets", str(home))
    assert "is not empty" in refused.output


def test_a_backup_that_was_changed_is_refused_with_what_is_wrong(
    home: Path, key: SigningKey, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = tmp_path_factory.mktemp("elsewhere") / "copy"
    run(home, "tenant", "create", "acme")
    told(home, "audit", "checkpoint")
    made = told(home, "backup", str(copy), "--no-secrets")
    before = (copy / "fairgate.db").read_bytes()
    assert told(home, "backup", "verify", str(copy), "--public-key", str(key.public)) == made | {
        "not_checked": []
    }
    assert (copy / "fairgate.db").read_bytes() == before
    assert "fairgate.db of the backup was changed" in _changed(home, copy, "DELETE FROM ledger", made).output
    wrong = SigningKey(key.name, bytes(32)).public
    assert (
        "the audit was changed" in run(home, "backup", "verify", str(copy), "--public-key", str(wrong)).output
    )
    with_hash = "UPDATE audit SET entry = x'00' WHERE seq = 0"
    assert "the audit was changed: row 0" in _changed(home, copy, with_hash, made, hashed=True).output


def _changed(home: Path, copy: Path, sql: str, made: dict[str, Any], *, hashed: bool = False) -> Result:
    """What the check says of a copy of the backup after SQL; `hashed`: the manifest's hash is made anew."""
    other = copy.with_name(f"changed-{hashed}")
    other.mkdir()
    (other / "fairgate.db").write_bytes((copy / "fairgate.db").read_bytes())
    with closing(sqlite3.connect(other / "fairgate.db")) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for (name,) in names:
            connection.execute(f"DROP TRIGGER {name}")
        connection.executescript(sql)
    files = {"fairgate.db": hash_of(other / "fairgate.db")} if hashed else made["files"]
    Manifest(**(made | {"files": files})).write(other)
    return run(home, "backup", "verify", str(other))


def script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join((f"#!{sys.executable}", "import os, subprocess, sys", *lines)))
    path.chmod(0o700)
    return path


def test_a_dump_of_postgresql_is_one_instant_and_its_rows_are_checked_in_a_scratch_database(
    home: Path,
    postgres_server: str,
    postgres_url: str,
    empty_postgres_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    place = tmp_path_factory.mktemp("elsewhere")
    copy, real = place / "copy", services.postgres_binaries()[0] / "pg_dump"
    url = postgres_url.replace("fairgate@", "fairgate:let-me%20in@")
    source = ("--database-url", url)
    told(home, "tenant", "create", "acme", *source)
    asyncio.run(signed(home, url))
    # Between the snapshot and its dump another tenant is made.
    later = ["-m", "ops.cli.main", "tenant", "create", "later", "--data-dir", str(home), *source]
    pg_dump = script(
        place / "pg_dump",
        "if '--version' not in sys.argv:",
        f"    subprocess.run([sys.executable, *{later}], check=True)",
        f"    open({str(place / 'seen')!r}, 'w').write(repr((sys.argv, os.environ['PGPASSWORD'])))",
        f"os.execv({str(real)!r}, ['pg_dump', *sys.argv[1:]])",
    )
    (place / "pg_restore").symlink_to(real.with_name("pg_restore"))
    config, (recipient, identity) = place / "fairgate.toml", age(place)
    config.write_text('log_level = "error"\n')
    made = told(
        home,
        *("backup", str(copy), "--age", recipient, "--config", str(config), "--pg-dump", str(pg_dump)),
        *source,
    )

    arguments, password = ast.literal_eval((place / "seen").read_text())
    assert password == "let-me in"
    assert not any("let-me" in each for each in arguments)
    assert "later" in run(home, "tenant", "list", *source).output
    assert told(home, "backup", "verify", str(copy)) == made | {"not_checked": ["ledger", "usage", "audit"]}
    scratch = services.create_database(postgres_server)
    try:
        checked = told(home, "backup", "verify", str(copy), "--scratch-url", scratch)
        again = run(home, "backup", "verify", str(copy), "--scratch-url", scratch)
    finally:
        services.drop_database(postgres_server, scratch)
    assert checked == made | {"not_checked": []}
    assert "tables: name an empty one" in again.output
    new, target = place / "new", ("--database-url", empty_postgres_url)
    assert "give --database-url" in run(new, "restore", str(copy), "--identity", str(identity)).output
    done = told(new, "restore", str(copy), "--identity", str(identity), *target)
    assert [each["name"] for each in told(new, "tenant", "list", *target)] == ["acme"]
    assert told(new, "audit", "verify", "--public-key", done["public_key"], *target)["ok"]
    assert told(new, "ledger", "verify", *target)["ok"]
    assert (new / "settings.toml").read_text() == config.read_text()


@pytest.fixture
def dumped(home: Path, postgres_url: str) -> Path:
    """A dump of a database whose audit is signed."""
    asyncio.run(signed(home, postgres_url))
    told(home, "backup", str(home / "dump"), "--no-secrets", "--database-url", postgres_url)
    return home / "dump"


def test_a_dump_that_was_changed_and_a_place_that_is_not_empty_are_refused_by_name(
    home: Path, dumped: Path, postgres_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    new = tmp_path_factory.mktemp("elsewhere") / "new"
    over = ("restore", str(dumped), "--secrets", str(home), "--database-url", postgres_url)
    assert "tables: name an empty one" in run(new, *over).output
    asyncio.run(beat(postgres_url))
    assert "serves the gateways gw_live 10.0.0.1:80:" in run(new, *over).output
    assert not new.exists()
    old = script(home / "pg_dump", "print('pg_dump (PostgreSQL) 11.3')")
    refused = run(
        home, "backup", str(new), "--no-secrets", "--pg-dump", str(old), "--database-url", postgres_url
    )
    assert f"{old} is of PostgreSQL 11, older than the server's" in refused.output
    assert "postgresql-client-" in refused.output
    assert not [*new.iterdir()]
    missing = run(home, "backup", "verify", str(dumped), "--pg-dump", str(new / "none"))
    assert "cannot be run" in missing.output
    [data] = [path for path in (dumped / "database").iterdir() if path.name == "toc.dat"]
    whole = data.read_bytes()
    for damaged in (whole[:-1], bytes([whole[0] ^ 1]) + whole[1:]):
        data.write_bytes(damaged)
        refused = run(home, "backup", "verify", str(dumped))
        assert "database/toc.dat of the backup was changed, or cut short" in refused.output
    listed = json.loads((dumped / "manifest.json").read_text())
    listed["files"]["database/toc.dat"] = hash_of(data)
    (dumped / "manifest.json").write_text(json.dumps(listed))
    assert "pg_restore failed" in run(home, "backup", "verify", str(dumped)).output


async def beat(url: str) -> None:
    database = open_database(url)
    try:
        await GatewayRegistry(database).beat("gw_live", "10.0.0.1:80", frozenset())
    finally:
        await database.close()


def test_a_backup_of_a_newer_schema_names_the_release_and_a_live_server_its_address(
    home: Path, key: SigningKey, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = tmp_path_factory.mktemp("elsewhere") / "copy"
    made = told(home, "backup", str(copy), "--no-secrets")
    Manifest(**(made | {"schema": "9999", "release": "7.1"})).write(copy)
    refused = run(copy.with_name("new"), "restore", str(copy), "--secrets", str(home))
    assert "schema 9999 is of a later release" in refused.output
    assert "Fairgate 7.1" in refused.output
    Manifest(**made).write(copy)
    Manifest(**(made | {"files": made["files"] | {"../age.txt": "00"}})).write(copy)
    assert "outside the backup" in run(home, "backup", "verify", str(copy)).output
    Manifest(**made).write(copy)
    text = (copy / "manifest.json").read_text()
    (copy / "manifest.json").write_text(text[: len(text) // 2])
    assert "manifest.json is damaged" in run(home, "backup", "verify", str(copy)).output
    (copy / "manifest.json").write_text(text)
    with datadir.serve_lock(home):
        (home / "run").mkdir()
        datadir.write_server_file(home, datadir.ServerFile("http://here:80", 1, ""))
        over = run(home, "restore", str(copy), "--secrets", str(home))
    assert "a server runs on" in over.output
    assert "http://here:80" in over.output
    assert "is not empty" in run(home, "restore", str(copy), "--secrets", str(home)).output


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_disk_that_fills_leaves_no_file_of_the_backup(
    kind: str, home: Path, request: pytest.FixtureRequest
) -> None:
    if not small_disk.can_mount():
        pytest.skip("this machine lets no test mount a file system of its own")
    disk = home / "disk"
    disk.mkdir()
    source = ["--database-url", request.getfixturevalue("postgres_url")] if kind == "postgresql" else []
    command = [sys.executable, "-m", "ops.cli.main", "backup", str(disk), "--no-secrets"]
    mounted = 'mount -t tmpfs -o size=32k none "$0" && { "$@"; echo "code $?"; ls -A "$0"; }'
    done = subprocess.run(
        [*small_disk.NAMESPACES, "sh", "-c", mounted, str(disk), *command, "--data-dir", str(home), *source],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "code 1\n", done.stdout + done.stderr
    assert "full" in done.stderr or "No space left" in done.stderr
    assert "backup.create" not in run(home, "audit", "list", *source).output
