"""A restore into an empty place: its audit goes on under another name, by a new key.

A restored log may be shorter than what witnesses have seen: under the old name it would be
a second history."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from ops.recovery import backup, secret_files
from ops.recovery import manifest as manifests
from ops.recovery.manifest import DATABASE_FILE, SECRETS_FILE, BackupRefused, Manifest
from ops.serving import datadir
from ops.serving.audit_key import AUDIT_KEY_FILE, of_new_log
from tenants.audit import checkpoints
from tenants.audit.key_history import RESTORE, WITHOUT_OLD_KEY
from tenants.audit.note import Checkpoint, PublicKey, SigningKey, open_checkpoint
from tenants.audit.store import LogEntry, head
from tenants.directory.gateways import end_all
from tenants.errors import AuditDamaged, Invalid
from tenants.ledger.verify import verify_ledger
from tenants.storage.database import open_database


async def restore(
    directory: Path,
    data_dir: Path,
    given: dict[str, str] | None,
    identity: Path | None,
    witnessed: str | None,
    actor: str,
    origin: str,
    *,
    url: str = "",
    pg_dump: Path | None = None,
    without_old_key: bool = False,
) -> dict[str, Any]:
    """`given`: secrets by file name, where the backup has none; `identity`: file of the age key that opens
    those of the backup; `witnessed`: the newest checkpoint that was kept elsewhere; `url`: an empty database
    for a dump of PostgreSQL; `without_old_key`: go on where the old key is lost. Returns the new public key
    and what was lost. Raises `BackupRefused`, `DataDirRefused`, `TenancyError`."""
    manifest = manifests.read(directory)
    if manifest.is_dump != bool(url):
        raise BackupRefused(
            "the backup is of PostgreSQL: give --database-url, an empty database there"
            if manifest.is_dump
            else "the backup is of SQLite, which goes into --data-dir: leave out the database's URL"
        )
    if (server := datadir.running_server(data_dir)) is not None:
        raise BackupRefused(f"a server runs on {data_dir} ({server.url}): name an empty --data-dir")
    datadir.require_whole(data_dir)
    manifests.require_empty(data_dir)
    found = _secrets(directory, manifest, given, identity)
    old, signer = _old_key(found, manifest, without_old_key)
    kept = None if witnessed is None else open_checkpoint(witnessed, [old])
    lost = _lost(manifest, kept)
    new = of_new_log()
    found[AUDIT_KEY_FILE] = new.to_secret_text()
    backup.check(directory, manifest, [], url or None, pg_dump)
    datadir.ensure(data_dir)
    unfinished = datadir.mark_unfinished(data_dir)
    try:
        secret_files.write(found, data_dir)
        if not manifest.is_dump:
            shutil.copyfile(directory / DATABASE_FILE, data_dir / DATABASE_FILE)
    except OSError as error:
        raise BackupRefused(
            f"{data_dir} cannot be filled: {error.strerror}; delete it, and restore again"
        ) from None
    said = {"backup_at": manifest.at, "size": manifest.audit_size, "root": manifest.audit_root}
    said |= {"last_ledger_id": manifest.last_ledger_id, "lost_rows": lost}
    said |= {} if signer else {WITHOUT_OLD_KEY: True}
    row = checkpoints.row_of_change(old, new.public, RESTORE, actor, origin, round(time.time() * 1e6), **said)
    database = open_database(url or f"sqlite:///{data_dir / DATABASE_FILE}")
    try:
        await database.write(lambda connection: _begin_anew(connection, kept, signer, new, row))
        report = await verify_ledger(database, None)
    finally:
        await database.close()
    if not report.ok:
        raise BackupRefused(f"restored, and its books do not agree: {report.problems[0]}")
    unfinished.unlink()
    return {"public_key": str(new.public), "before": str(old)} | said


def _begin_anew(
    connection: Connection, kept: Checkpoint | None, old: SigningKey | None, new: SigningKey, row: LogEntry
) -> None:
    edge = head(connection)
    if kept is not None and kept.size <= edge.size:
        try:
            checkpoints.require_extension(connection, kept, edge)
        except AuditDamaged as error:
            raise BackupRefused(
                f"the backup is not of the log that the witness has seen: {error}; keep both, they are the"
                " evidence"
            ) from None
    checkpoints.hand_over(connection, old, new, row)
    end_all(connection)


def _secrets(
    directory: Path, manifest: Manifest, given: dict[str, str] | None, identity: Path | None
) -> dict[str, str]:
    if given is not None:
        return dict(given)
    if SECRETS_FILE not in manifest.files:
        raise BackupRefused(
            "the backup has no secrets: give --secrets, a directory with pepper and audit-key"
        )
    if identity is None:
        raise BackupRefused(f"{SECRETS_FILE} is encrypted: give --identity, the file of the age key")
    return secret_files.decrypt(directory / SECRETS_FILE, identity)


def _old_key(
    found: dict[str, str], manifest: Manifest, may_lack: bool
) -> tuple[PublicKey, SigningKey | None]:
    """The log's key, and what signs with it, which hands over to the new one; None: it is lost."""
    if manifest.public_key is None:
        raise BackupRefused("the backup's audit was never signed: there is nothing in it to go on from")
    try:
        key = SigningKey.parse(found.get(AUDIT_KEY_FILE, ""))
    except Invalid:
        key = None
    if key is not None and str(key.public) == manifest.public_key:
        return key.public, key
    if may_lack:
        return PublicKey.parse(manifest.public_key), None
    raise BackupRefused(
        f"the secrets lack the {AUDIT_KEY_FILE} of {manifest.public_key}: only its holder can hand the log"
        " over; give --secrets, a directory with that file and the pepper; where the key is lost, give"
        " --without-old-key, and every witness has to accept the new one by hand"
    )


def _lost(manifest: Manifest, kept: Checkpoint | None) -> dict[str, int] | None:
    """Rows that a witness has seen and the backup has not; None: none, or not known."""
    if kept is None or kept.size <= manifest.audit_size:
        return None
    return {"first": manifest.audit_size, "last": kept.size - 1}
