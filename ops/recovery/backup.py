"""A backup of a running gateway's SQLite database and secrets, and its check without a server."""

from __future__ import annotations

import base64
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, func, select
from sqlalchemy.exc import SQLAlchemyError

from ops.recovery import manifest as manifests
from ops.recovery import secret_files
from ops.recovery.manifest import DATABASE_FILE, SECRETS_FILE, BackupRefused, Manifest
from ops.settings.settings import Settings
from tenants.audit import checkpoints, store
from tenants.audit.log import verify_stored
from tenants.audit.note import PublicKey
from tenants.ledger.verify import check_rows
from tenants.outbox.figures import note_backup
from tenants.release import this_release
from tenants.storage.database import BUSY_TIMEOUT_S, open_database, parse_url
from tenants.storage.tables import ledger

ACTION = "backup.create"


async def create(
    settings: Settings, directory: Path, recipient: str | None, actor: str, origin: str
) -> Manifest:
    """Copies the database as it is at one instant, and secrets where there is a recipient. The audit gets
    a row of it, which is in the copy. Raises `BackupRefused`, `TenancyError`."""
    source = _sqlite_file(settings)
    files = {}
    try:
        manifests.require_empty(directory)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        if recipient is not None:
            sealed = secret_files.encrypt(secret_files.collect(settings.data_dir), recipient)
            (directory / SECRETS_FILE).write_bytes(sealed)
            files[SECRETS_FILE] = manifests.hash_of(directory / SECRETS_FILE)
        database, now_us = open_database(settings.resolved_database_url), round(time.time() * 1e6)
        row = store.LogEntry(
            now_us, actor, origin, ACTION, "database", after={"has_secrets": bool(recipient)}
        )
        try:
            await database.write(lambda connection: store.append(connection, row))
        finally:
            await database.close()
        copy = directory / DATABASE_FILE
        with closing(sqlite3.connect(source, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as connection:
            connection.execute("VACUUM INTO ?", (str(copy),))
        os.chmod(copy, 0o600)
        files[DATABASE_FILE] = manifests.hash_of(copy)
        with opened(directory) as stored:
            made = Manifest(**figures(stored), release=this_release(), at=_iso(now_us), files=files)
        made.write(directory)
        await _note(settings.resolved_database_url, now_us)
    except (OSError, sqlite3.Error) as error:
        raise BackupRefused(f"the backup {directory} cannot be written: {error}") from None
    return made


def verify(directory: Path, keys: list[PublicKey]) -> Manifest:
    """Checks the hashes, every row of the ledger, and the audit by `keys`, else by the manifest's key.
    Changes nothing. Raises `BackupRefused` for the first thing that is wrong, `Invalid`."""
    manifest = manifests.read(directory)
    if not keys and manifest.public_key is not None:
        keys = [PublicKey.parse(manifest.public_key)]
    try:
        with opened(directory) as connection:
            found = figures(connection)
            wrong = [name for name, value in found.items() if value != getattr(manifest, name)]
            if wrong:
                raise BackupRefused(f"the manifest's {wrong[0]} is not that of the database beside it")
            if (finding := verify_stored(connection, keys).finding) is not None:
                raise BackupRefused(f"the audit was changed: {finding}")
            if problems := check_rows(connection).problems:
                raise BackupRefused(f"the ledger's rows do not agree: {problems[0]}")
    except SQLAlchemyError as error:
        raise BackupRefused(f"{DATABASE_FILE} of the backup cannot be read: {error}") from None
    return manifest


@contextmanager
def opened(directory: Path) -> Iterator[Connection]:
    """The backup's database, which stays as it is."""
    path = (directory / DATABASE_FILE).absolute()

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False)

    engine = create_engine("sqlite+pysqlite://", creator=connect)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def figures(connection: Connection) -> dict[str, Any]:
    """What a manifest says of a database."""
    edge, key = store.head(connection), checkpoints.public_key(connection)
    return {
        "schema": connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one(),
        "audit_size": edge.size,
        "audit_root": base64.b64encode(edge.root).decode(),
        "public_key": None if key is None else str(key),
        "last_ledger_id": connection.execute(select(func.max(ledger.c.id))).scalar() or 0,
    }


def _sqlite_file(settings: Settings) -> Path:
    parsed = parse_url(settings.resolved_database_url)
    if parsed.get_backend_name() != "sqlite":
        raise BackupRefused(
            "this copies SQLite; copy PostgreSQL with `pg_dump --format=directory`, and keep pepper and"
            " audit-key with it"
        )
    path = Path(parsed.database or "")
    if not path.exists():
        raise BackupRefused(f"there is no database {path}: name the right --data-dir")
    return path


async def _note(url: str, at_us: int) -> None:
    database = open_database(url)
    try:
        await database.write(lambda connection: note_backup(connection, at_us))
    finally:
        await database.close()


def _iso(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1e6, UTC).isoformat(timespec="seconds")
