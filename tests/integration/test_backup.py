"""`fairgate backup` of SQLite: what is copied, what a change of it is called; the audit after a restore."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyrage
import pytest
from click.testing import CliRunner, Result

from ops.cli.main import cli
from ops.recovery.manifest import Manifest, hash_of
from ops.serving import audit_key
from ops.serving.datadir import private_file
from tenants.audit.log import AuditLog
from tenants.audit.note import PublicKey, SigningKey
from tenants.storage.database import open_database


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


async def signed(home: Path) -> SigningKey:
    database = open_database(f"sqlite:///{home / 'fairgate.db'}")
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
    assert [each["action"] for each in shown].count("backup.create") == 1


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
    assert told(home, "backup", "verify", str(copy), "--public-key", str(key.public)) == made
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
