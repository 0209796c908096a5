"""A backup of a running gateway's database and secrets, and its check without a server."""

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
from ops.recovery import postgres, secret_files
from ops.recovery.manifest import DATABASE_FILE, DUMP_DIRECTORY, SECRETS_FILE, BackupRefused, Manifest
from ops.serving.datadir import PEPPER_FILE
from ops.settings.settings import Settings
from tenants.audit import checkpoints, store
from tenants.audit.log import verify_stored
from tenants.audit.note import PublicKey
from tenants.ledger.verify import check_rows
from tenants.outbox.figures import note_backup
from tenants.release import this_release
from tenants.storage.database import BUSY_TIMEOUT_S, open_database, parse_url
from tenants.storage.tables import ledger
from tenants.usage.verify import differences, tenants_charged

ACTION = "backup.create"


async def create(
    settings: Settings,
    directory: Path,
    recipient: str | None,
    actor: str,
    origin: str,
    *,
    config: Path | None = None,
    pg_dump: Path | None = None,
) -> Manifest:
    """Copies the database as it is at one instant, and secrets and the file `config` where there is a
    recipient. The audit then gets a row of it, which is not in the copy. A failed one leaves no file.
    `pg_dump`: the client to use. Raises `BackupRefused`, `TenancyError`."""
    url, at_us = settings.resolved_database_url, round(time.time() * 1e6)
    source = _sqlite_file(url)
    manifests.require_empty(directory)
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        if recipient is not None:
            found = secret_files.collect(settings.data_dir, config)
            found |= {PEPPER_FILE: settings.pepper} if settings.pepper else {}
            (directory / SECRETS_FILE).write_bytes(secret_files.encrypt(found, recipient))
        if source is None:
            said = postgres.dump(url, directory / DUMP_DIRECTORY, pg_dump, figures)
        else:
            said = _copy(source, directory)
        made = Manifest(**said, release=this_release(), at=_iso(at_us), files=manifests.hashes(directory))
        made.write(directory)
        # Last: one that failed must not look like the newest.
        after = {"has_secrets": bool(recipient), "audit_size": made.audit_size, "root": made.audit_root}
        now_us = round(time.time() * 1e6)
        row = store.LogEntry(now_us, actor, origin, ACTION, "database", after=after)

        def note(connection: Connection) -> None:
            store.append(connection, row)
            note_backup(connection, at_us)

        database = open_database(url)
        try:
            await database.write(note)
        finally:
            await database.close()
    except BaseException as error:
        manifests.clear(directory)
        if not isinstance(error, (OSError, sqlite3.Error)):
            raise
        raise BackupRefused(f"the backup {directory} cannot be written, and was removed: {error}") from None
    return made


def _copy(source: Path, directory: Path) -> dict[str, Any]:
    copy = directory / DATABASE_FILE
    with closing(sqlite3.connect(source, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as connection:
        connection.execute("VACUUM INTO ?", (str(copy),))
    os.chmod(copy, 0o600)
    with opened(directory) as stored:
        return figures(stored)


def verify(
    directory: Path, keys: list[PublicKey], scratch_url: str | None = None, pg_dump: Path | None = None
) -> Manifest:
    """Checks the hashes, every row of the ledger, the sums of usage, and the audit by `keys`, else by the
    manifest's key. A dump of PostgreSQL is put into the empty database `scratch_url`; without one its rows
    are not checked. Changes nothing else. Raises `BackupRefused` for the first thing that is wrong,
    `Invalid`, `DatabaseUnavailable`."""
    manifest = manifests.read(directory)
    if manifest.is_dump and scratch_url is None:
        postgres.list_dump(directory / DUMP_DIRECTORY, pg_dump)
    else:
        check(directory, manifest, keys, scratch_url, pg_dump)
    return manifest


def check(
    directory: Path, manifest: Manifest, keys: list[PublicKey], url: str | None, pg_dump: Path | None
) -> None:
    """As `verify`, where the files are those of the manifest; a dump is in the database `url` then."""
    if not keys and manifest.public_key is not None:
        keys = [PublicKey.parse(manifest.public_key)]
    if manifest.is_dump and url is not None:
        postgres.put(directory / DUMP_DIRECTORY, url, pg_dump)
        with postgres.connected(url) as connection:
            _check_rows(connection, manifest, keys)
        return
    try:
        with opened(directory) as connection:
            _check_rows(connection, manifest, keys)
    except SQLAlchemyError as error:
        raise BackupRefused(f"{DATABASE_FILE} of the backup cannot be read: {error}") from None


def _check_rows(connection: Connection, manifest: Manifest, keys: list[PublicKey]) -> None:
    found = figures(connection)
    wrong = [name for name, value in found.items() if value != getattr(manifest, name)]
    if wrong:
        raise BackupRefused(f"the manifest's {wrong[0]} is not that of the database beside it")
    if (finding := verify_stored(connection, keys).finding) is not None:
        raise BackupRefused(f"the audit was changed: {finding}")
    if problems := check_rows(connection).problems:
        raise BackupRefused(f"the ledger's rows do not agree: {problems[0]}")
    for tenant_id in tenants_charged(connection):
        if problem := next(differences(tenant_id, connection).problems(), None):
            raise BackupRefused(f"the sums of usage are not the ledger's: {problem}")


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


def _sqlite_file(url: str) -> Path | None:
    """None: it is PostgreSQL."""
    parsed = parse_url(url)
    if parsed.get_backend_name() != "sqlite":
        return None
    path = Path(parsed.database or "")
    if not path.exists():
        raise BackupRefused(f"there is no database {path}: name the right --data-dir")
    return path


def _iso(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1e6, UTC).isoformat(timespec="seconds")
