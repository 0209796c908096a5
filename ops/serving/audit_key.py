"""The file of the key that signs the audit, in the data directory, readable by its owner only.

Whoever has it can sign another history: keep it from those whose acts the audit records.
"""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path

from ops.serving.datadir import DataDirRefused, private_file
from tenants.audit.checkpoints import StoredCheckpoint
from tenants.audit.log import AuditLog
from tenants.audit.note import PublicKey, SigningKey
from tenants.errors import AuditDamaged, Invalid

AUDIT_KEY_FILE = "audit-key"
NEXT_KEY_FILE = "audit-key.next-{}"
"""A new key, by its id, before the log is signed with it."""

log = logging.getLogger("fairgate.serve")


def read(data_dir: Path) -> SigningKey | None:
    """The key that the audit is signed with; None: no file. Raises `DataDirRefused`."""
    return _read(data_dir / AUDIT_KEY_FILE)


def read_again(data_dir: Path) -> SigningKey | None:
    """As `read`, while a gateway runs; None for an unreadable file."""
    try:
        return read(data_dir)
    except DataDirRefused as error:
        log.warning("%s", error)
        return None


def _read(path: Path) -> SigningKey | None:
    if not path.exists():
        return None
    try:
        return SigningKey.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataDirRefused(f"audit key {path} cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, Invalid):
        raise DataDirRefused(
            f"audit key {path} is damaged: restore it from a backup, or move it away; without it this gateway"
            " does not sign the audit"
        ) from None


def of_new_log() -> SigningKey:
    """A key under a name that no other log has."""
    return SigningKey(f"fairgate-audit/{secrets.token_hex(8)}", secrets.token_bytes(32))


async def own(data_dir: Path, audit: AuditLog) -> SigningKey | None:
    """The file's key, or a new one where the log has none; None: others sign. Raises `DataDirRefused`."""
    known = await audit.public_key()
    _finish_change(data_dir, known)
    path, key = data_dir / AUDIT_KEY_FILE, read(data_dir)
    if key is None and known is None:
        made = of_new_log()
        # Before the database notes it: a key noted there and written nowhere could sign nothing.
        private_file(path, made.to_secret_text())
        known = await audit.register(made.public)
        if known == made.public:
            return made
        path.unlink()  # another gateway was first
    if key is not None and known is None:
        known = await audit.register(key.public)
    if key is not None and key.public == known:
        return key
    log.warning(
        "this gateway does not sign the audit: %s; those that have the key of %s do. Copy their %s",
        "its key is another log's" if key is not None else "it has no key",
        known,
        AUDIT_KEY_FILE,
    )
    return None


async def change(data_dir: Path, actor: str, origin: str, audit: AuditLog) -> StoredCheckpoint:
    """Signs the log with a new key from now on, and puts it into the file; returns the checkpoint that both
    keys sign. `audit` has the old key. Raises `DataDirRefused`, `Invalid`, `AuditDamaged`."""
    _finish_change(data_dir, await audit.public_key())
    old = read(data_dir)
    if old is None:
        raise Invalid(
            "audit key", f"there is no {AUDIT_KEY_FILE} in {data_dir}: only its holder can change it"
        )
    new = SigningKey(old.name, secrets.token_bytes(32))
    # Before the log is signed with it: see `own`. Where this ends in between, the next start goes on.
    written = private_file(_next_file(data_dir, new.public), new.to_secret_text())
    try:
        made = await audit.change_key(new, actor, origin)
    except (Invalid, AuditDamaged):
        written.unlink()
        raise
    _finish_change(data_dir, new.public)
    return made


def _finish_change(data_dir: Path, known: PublicKey | None) -> None:
    """Puts the new key in its place where the log is signed with it already."""
    if known is not None:
        with suppress(FileNotFoundError):
            os.replace(_next_file(data_dir, known), data_dir / AUDIT_KEY_FILE)


def _next_file(data_dir: Path, key: PublicKey) -> Path:
    return data_dir / NEXT_KEY_FILE.format(key.key_id.hex())
