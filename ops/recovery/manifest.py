"""The manifest of a backup: of which database and instant it is, and the hash of each of its files."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from migrations import runner

MANIFEST_FILE = "manifest.json"
DATABASE_FILE = "fairgate.db"
DUMP_DIRECTORY = "database"
"""In place of the file: a dump of PostgreSQL."""
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
    """SHA-256 by the file's path in the backup, in hexadecimal digits."""
    format: int = FORMAT

    @property
    def is_dump(self) -> bool:
        """Whether it is of PostgreSQL."""
        return f"{DUMP_DIRECTORY}/toc.dat" in self.files

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
    if manifest.format != FORMAT or not (DATABASE_FILE in manifest.files or manifest.is_dump):
        raise BackupRefused(f"{path} has the format {manifest.format}; this program reads {FORMAT}")
    if runner.is_newer(manifest.schema):
        raise BackupRefused(
            f"the backup's schema {manifest.schema} is of a later release than this program, which knows"
            f" {runner.head()}: install Fairgate {manifest.release} or newer"
        )
    for name, digest in manifest.files.items():
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or name.startswith("/"):
            raise BackupRefused(f"{path} names {name!r}, which is outside the backup")
        try:
            found = hash_of(directory / name)
        except OSError as error:
            raise BackupRefused(f"{name} of the backup cannot be read: {error.strerror}") from None
        if found != digest:
            raise BackupRefused(f"{name} of the backup was changed, or cut short: its SHA-256 is another")
    return manifest


def require_empty(directory: Path) -> None:
    """Raises `BackupRefused` for a directory in which something is."""
    try:
        is_used = directory.exists() and any(directory.iterdir())
    except OSError as error:
        raise BackupRefused(f"{directory} cannot be read: {error.strerror}") from None
    if is_used:
        raise BackupRefused(f"{directory} is not empty: name one that does not exist yet")


def hashes(directory: Path) -> dict[str, str]:
    """Of each file below a directory, by its path in it."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): hash_of(path) for path in files}


def clear(directory: Path) -> None:
    """Removes what a backup that failed has written: a full disk has room again."""
    for path in directory.glob("*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def hash_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits. Raises `OSError`."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
