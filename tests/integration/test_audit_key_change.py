"""The audit's key is changed: in database and file at once, for gateways that run, and after a crash."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest
from sqlalchemy import Connection, select

from ops.serving import audit_key
from ops.serving.datadir import DataDirRefused
from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.audit import store
from tenants.audit.log import AuditLog
from tenants.audit.note import PublicKey, SigningKey, open_checkpoint
from tenants.errors import AuditDamaged, Invalid
from tenants.storage.database import Database, open_database
from tenants.storage.tables import audit
from tests.support.audited import audited
from tests.support.commands import answer_of, fairgate


async def add(database: Database, count: int = 3) -> None:
    def rows(connection: Connection) -> None:
        for number in range(count):
            store.append(connection, store.LogEntry(number, "cli:root", "cli", "tenant.update", "ten_1"))

    await database.write(rows)


async def home(database: Database, path: Path) -> tuple[Path, SigningKey]:
    """A data directory with a key, and a log that it has signed."""
    os.makedirs(path)
    own = await audit_key.own(path, AuditLog(database))
    assert own is not None
    await add(database)
    await AuditLog(database, own).make_checkpoint()
    return path, own


async def change(database: Database, path: Path) -> SigningKey:
    log = AuditLog(database, audit_key.read(path))
    await audit_key.change(path, "cli:root", "cli", log)
    new = audit_key.read(path)
    assert new is not None
    return new


async def test_the_change_is_a_row_signed_by_both_and_one_key_checks_all(
    database: Database, tmp_path: Path, pepper: bytes
) -> None:
    path, first = await home(database, tmp_path / "one")
    kept = (await AuditLog(database).checkpoints())[0].note
    keys = [first]
    for _ in range(2):
        await add(database)
        keys.append(await change(database, path))
        await add(database)
        await AuditLog(database, keys[-1]).make_checkpoint()
    assert len({key.seed for key in keys}) == 3
    assert (path / audit_key.AUDIT_KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.iterdir()] == [audit_key.AUDIT_KEY_FILE]
    log = AuditLog(database)
    for key in keys:
        verdict = await log.verify([key.public], [kept])
        assert (verdict.finding, verdict.rows) == (None, verdict.signed)
    with pytest.raises(Invalid, match="no known key"):
        await log.verify([SigningKey(first.name, bytes(32)).public], [kept])
    [row, again] = await audited(Admin(Transactions(database, pepper)), act="audit.rotate_key")
    assert (row.before, row.after) == (
        {"public_key": str(keys[0].public)},
        {"public_key": str(keys[1].public)},
    )
    assert again.before == row.after
    note = next(each.note for each in await log.checkpoints() if each.size == row.seq + 1)
    assert [open_checkpoint(note, [key.public]).size for key in keys[:2]] == [row.seq + 1] * 2
    # The proof of a row by the new key.
    proof = await log.prove(0)
    assert proof.proves(cast(bytes, proof.entry), open_checkpoint(proof.checkpoint, [keys[2].public]))


async def test_a_gateway_that_runs_goes_on_with_the_new_key_and_one_without_it_stops_signing(
    database: Database, database_url: str, tmp_path: Path
) -> None:
    path, first = await home(database, tmp_path / "one")
    other = open_database(database_url)
    running = AuditLog(other, first, read_key=lambda: audit_key.read_again(path))
    elsewhere = AuditLog(other, first)
    new = await change(database, path)
    await add(database)
    made = await running.make_checkpoint()
    assert open_checkpoint(made.note, [new.public]).size == made.size
    await add(database)
    with pytest.raises(Invalid, match="signed with another one"):
        await elsewhere.make_checkpoint()
    with pytest.raises(Invalid, match="signed with another one"):
        await elsewhere.change_key(SigningKey(first.name, bytes(32)), "cli:root", "cli")
    assert await audit_key.own(path, AuditLog(other)) == new
    await other.close()


async def test_a_change_that_was_interrupted_is_finished_by_the_next_start(
    database: Database, tmp_path: Path
) -> None:
    path, first = await home(database, tmp_path / "one")
    new = SigningKey(first.name, bytes(31) + b"n")
    never = SigningKey(first.name, bytes(31) + b"x")
    for key in (new, never):
        file = path / audit_key.NEXT_KEY_FILE.format(key.public.key_id.hex())
        file.write_text(key.to_secret_text() + "\n")
    assert await audit_key.own(path, AuditLog(database)) == first  # the log knows neither of them
    await AuditLog(database, first).change_key(new, "cli:root", "cli")  # and then the process was killed
    assert await audit_key.own(path, AuditLog(database)) == new
    assert audit_key.read(path) == new
    newest = await change(database, path)
    assert (await AuditLog(database).public_key()) == newest.public


async def test_a_change_that_cannot_be_is_none(database: Database, tmp_path: Path) -> None:
    path, first = await home(database, tmp_path / "one")
    empty = tmp_path / "two"
    os.makedirs(empty)
    with pytest.raises(Invalid, match="there is no audit-key in"):
        await audit_key.change(empty, "cli:root", "cli", AuditLog(database))
    log = AuditLog(database, first)
    for key in (first, SigningKey("other.example/log", bytes(32))):
        with pytest.raises(Invalid, match="needs the log's name"):
            await log.change_key(key, "cli:root", "cli")

    def set_back(connection: Connection) -> None:
        connection.exec_driver_sql("UPDATE audit_head SET size = 1, frontier = (SELECT root FROM audit_head)")

    await database.write(set_back)
    with pytest.raises(AuditDamaged):
        await audit_key.change(path, "cli:root", "cli", log)
    assert [each.name for each in path.iterdir()] == [audit_key.AUDIT_KEY_FILE]
    assert audit_key.read(path) == first
    assert await AuditLog(database).public_key() == first.public
    (path / audit_key.AUDIT_KEY_FILE).write_text("x")
    with pytest.raises(DataDirRefused, match="is damaged"):
        await change(database, path)
    assert audit_key.read_again(path) is None


async def test_no_row_holds_a_key_s_secret(database: Database, tmp_path: Path) -> None:
    path, first = await home(database, tmp_path / "one")
    new = await change(database, path)
    entries = await database.read(lambda one: list(one.execute(select(audit.c.entry)).scalars()))
    for key in (first, new):
        secret = key.to_secret_text().partition(f"+{key.public.key_id.hex()}+")[2].encode()
        assert len(secret) > 40  # whole, whatever letters it has
        assert not any(secret in entry for entry in entries)
        assert PublicKey.parse(str(key.public)) == key.public


async def test_a_key_that_was_made_before_is_the_logs(database: Database, tmp_path: Path) -> None:
    path = tmp_path / "data"
    made = answer_of(path, "audit", "key", "make")
    own = await audit_key.own(path, AuditLog(database))
    assert own is not None
    assert str(own.public) == made["public_key"]
    again = fairgate(path, "audit", "key", "make")
    assert again.exit_code == 1
    assert "is there already: `fairgate audit key rotate`" in again.output
    assert audit_key.read(path) == own
