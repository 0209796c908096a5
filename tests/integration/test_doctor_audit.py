"""`fairgate doctor`: a key of the audit that others can read, rows that are not signed, a wrong clock."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ops.serving import audit_key, doctor
from ops.settings.settings import Settings
from tenants.audit import store
from tenants.audit.log import AuditLog
from tenants.audit.note import SigningKey
from tenants.storage.database import Database


async def add(database: Database, ago_s: float) -> None:
    row = store.LogEntry(round((time.time() - ago_s) * 1e6), "cli:root", "cli", "tenant.update", "ten_1")
    await database.write(lambda connection: store.append(connection, row))


async def test_the_key_s_file_and_the_age_of_what_is_not_signed_are_looked_at(
    database: Database, database_url: str, tmp_path: Path
) -> None:
    settings = Settings(data_dir=tmp_path / "home", database_url=database_url)
    os.makedirs(settings.data_dir, mode=0o700)

    async def found() -> tuple[bool, str]:
        finding = await doctor._audit(settings)
        assert finding.check == "audit"
        assert bool(finding.advice) is not finding.ok
        return finding.ok, finding.detail

    await add(database, ago_s=3_600)
    assert await found() == (True, "not signed yet: the first server makes the key")
    own = await audit_key.own(settings.data_dir, AuditLog(database))
    assert own is not None
    await AuditLog(database, own).make_checkpoint()
    assert await found() == (True, "1 of 1 rows are signed")
    await add(database, ago_s=100)
    assert await found() == (True, "1 of 2 rows are signed")
    await add(database, ago_s=3_600)  # behind one that is not late yet: rows are in order
    assert await found() == (True, "1 of 3 rows are signed")
    await AuditLog(database, own).make_checkpoint()
    await add(database, ago_s=200)
    is_ok, detail = await found()
    assert not is_ok
    assert detail.startswith("row 3 of the audit is not signed since 20")
    await AuditLog(database, own).make_checkpoint()
    file = settings.data_dir / audit_key.AUDIT_KEY_FILE
    for mode in (0o640, 0o604):
        os.chmod(file, mode)
        assert await found() == (False, f"{file} is open to others (mode {mode:o})")
    os.chmod(file, 0o600)
    key = SigningKey("other.example/log", bytes(32))
    for text, is_right in (("x", False), (key.to_secret_text(), True)):
        file.write_text(text)
        assert (await found())[0] is is_right
    assert await found() == (True, "4 of 4 rows are signed, by other gateways")


@pytest.mark.parametrize("off_s", [-3_600.0, 3_600.0])
async def test_a_clock_that_is_not_the_database_s_is_found(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off_s: float
) -> None:
    settings = Settings(data_dir=tmp_path, database_url=postgres_url)
    assert (await doctor._clock(settings)).ok
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + off_s)
    finding = await doctor._clock(settings)
    assert not finding.ok
    assert "differs from the database's by 3600" in finding.detail or "by 3599" in finding.detail
    assert "synchronise" in finding.advice
