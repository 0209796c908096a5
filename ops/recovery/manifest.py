"""The manifest of a backup: of which database and instant it is, and the hash of each of its files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST_FILE = "manifest.json"
DATABASE_FILE = "fairgate.db"
SECRETS_FILE = "secrets.age"
FORMAT = 1
BLOCK_BYTES = 1 << 20


class BackupRefused(Exception):
    """A backup cannot be made, or is none that can be restored; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Manifest:
    release: str
    schema: str
    at: str
    """When the copy was taken: ISO 8601, UTC."""
    audit_size: int
    """Rows of the audit."""
    audit_root: str
    """Root of the tree over them, as base64."""
    public_key: str | None
    """What the audit is signed with; None: it was not signed yet."""
    last_ledger_id: int
    """0: the ledger has no row."""
    files: dict[str, str]
    """SHA-256 by the file's name, in hexadecimal digits."""
    format: int = FORMAT

    def write(self, directory: Path) -> None:
        text = json.dumps(asdict(self), indent=2) + "\n"
        (directory / MANIFEST_FILE).write_text(text, encoding="utf-8")


def read(directory: Path) -> Manifest:
    """The manifest, once every file has the hash that it names. Raises `BackupRefused`."""
    path = directory / MANIFEST_FILE
    try:
        manifest = Manifest(**json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise BackupRefused(f"{path} cannot be read ({error.strerror}): {directory} is no backup") from None
    except (ValueError, TypeError):
        raise BackupRefused(f"{path} is damaged, or of a newer program: take another backup") from None
    if manifest.format != FORMAT or DATABASE_FILE not in manifest.files:
        raise BackupRefused(f"{path} has the format {manifest.format}; this program reads {FORMAT}")
    for name, digest in manifest.files.items():
        try:
            found = hash_of(directory / Path(name).name)
        except OSError as error:
            raise BackupRefused(f"{name} of the backup cannot be read: {error.strerror}") from None
        if found != digest:
            raise BackupRefused(f"{name} of the backup was changed: its SHA-256 is not the manifest's")
    return manifest


def require_empty(directory: Path) -> None:
    """Raises `BackupRefused` for a directory in which something is."""
    if directory.exists() and any(directory.iterdir()):
        raise BackupRefused(f"{directory} is not empty: name one that does not exist yet")


def hash_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits. Raises `OSError`."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
