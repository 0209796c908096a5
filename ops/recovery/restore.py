"""A restore into an empty place: its audit goes on under another name, by a new key.

A restored log may be shorter than what witnesses have seen: under the old name it would be
a second history."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from ops.recovery import backup, secret_files
from ops.recovery import manifest as manifests
from ops.recovery.manifest import DATABASE_FILE, SECRETS_FILE, BackupRefused, Manifest
from ops.serving import datadir
from ops.serving.audit_key import AUDIT_KEY_FILE, of_new_log
from tenants.audit import checkpoints
from tenants.audit.key_history import RESTORE
from tenants.audit.note import SigningKey, open_checkpoint
from tenants.directory.gateways import end_all
from tenants.errors import Invalid
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
    url: str = "",
    pg_dump: Path | None = None,
) -> dict[str, Any]:
    """`given`: secrets by file name, where the backup has none; `identity`: file of the age key that opens
    those of the backup; `witnessed`: the newest checkpoint that was kept elsewhere; `url`: an empty database
    for a dump of PostgreSQL. Returns the new public key and what was lost. Raises `BackupRefused`,
    `DataDirRefused`, `TenancyError`."""
    manifest = manifests.read(directory)
    if manifest.is_dump != bool(url):
        raise BackupRefused(
            "the backup is of PostgreSQL: give --database-url, an empty database there"
            if manifest.is_dump
            else "the backup is of SQLite, which goes into --data-dir: leave out the database's URL"
        )
    if (server := datadir.running_server(data_dir)) is not None:
        raise BackupRefused(f"a server runs on {data_dir} ({server.url}): name an empty --data-dir")
    manifests.require_empty(data_dir)
    found = _secrets(directory, manifest, given, identity)
    old = _signing_key(found, manifest)
    lost = _lost(manifest, old, witnessed)
    new = of_new_log()
    found[AUDIT_KEY_FILE] = new.to_secret_text()
    backup.check(directory, manifest, [], url or None, pg_dump)
    datadir.ensure(data_dir)
    secret_files.write(found, data_dir)
    if not manifest.is_dump:
        shutil.copyfile(directory / DATABASE_FILE, data_dir / DATABASE_FILE)
    said = {"backup_at": manifest.at, "size": manifest.audit_size, "root": manifest.audit_root}
    said |= {"last_ledger_id": manifest.last_ledger_id, "lost_rows": lost}
    row = checkpoints.row_of_change(old, new, RESTORE, actor, origin, round(time.time() * 1e6), **said)
    database = open_database(url or f"sqlite:///{data_dir / DATABASE_FILE}")
    try:
        await database.write(lambda connection: checkpoints.hand_over(connection, old, new, row))
        await database.write(end_all)
        report = await verify_ledger(database, None)
    finally:
        await database.close()
    if not report.ok:
        raise BackupRefused(f"restored, and its books do not agree: {report.problems[0]}")
    return {"public_key": str(new.public), "before": str(old.public)} | said


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


def _signing_key(found: dict[str, str], manifest: Manifest) -> SigningKey:
    """The key that hands over to the new one."""
    if manifest.public_key is None:
        raise BackupRefused("the backup's audit was never signed: there is nothing in it to go on from")
    try:
        key = SigningKey.parse(found.get(AUDIT_KEY_FILE, ""))
    except Invalid:
        key = None
    if key is None or str(key.public) != manifest.public_key:
        raise BackupRefused(
            f"the secrets lack the {AUDIT_KEY_FILE} of {manifest.public_key}: only its holder can hand the"
            " log over; give --secrets, a directory with that file and the pepper"
        )
    return key


def _lost(manifest: Manifest, old: SigningKey, witnessed: str | None) -> dict[str, int] | None:
    """Rows that a witness has seen and the backup has not; None: none, or not known."""
    if witnessed is None:
        return None
    size = open_checkpoint(witnessed, [old.public]).size
    return None if size <= manifest.audit_size else {"first": manifest.audit_size, "last": size - 1}
