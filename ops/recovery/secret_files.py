"""Secrets of a data directory in a backup: one file, encrypted to the recipient's age key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ops.recovery.manifest import BackupRefused
from ops.serving.audit_key import AUDIT_KEY_FILE
from ops.serving.datadir import PEPPER_FILE, private_file

SETTINGS_FILE = "settings.toml"
"""The file of `--config`: its URLs may have passwords."""
PATTERNS = (PEPPER_FILE, AUDIT_KEY_FILE, "engine-server*.keys", "engine-gateway*.keys", SETTINGS_FILE)


def collect(directory: Path, config: Path | None = None) -> dict[str, str]:
    """Text by file name of all that a data directory has of them, and of the file `config`. Raises
    `BackupRefused`."""
    found = {path.name: path for pattern in PATTERNS for path in sorted(directory.glob(pattern))}
    found |= {} if config is None else {SETTINGS_FILE: config}
    try:
        return {name: path.read_text(encoding="utf-8") for name, path in found.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise BackupRefused(f"a secret of {directory} cannot be read: {error}") from None


def encrypt(secrets: dict[str, str], recipient: str) -> bytes:
    """`recipient`: a public age key (`age1…`). Raises `BackupRefused`."""
    age = _age()
    try:
        to = age.x25519.Recipient.from_str(recipient)
    except age.RecipientError:
        raise BackupRefused(
            "--age needs a public key that begins with age1: `age-keygen` makes one"
        ) from None
    return bytes(age.encrypt(json.dumps(secrets).encode(), [to]))


def decrypt(path: Path, identity_file: Path) -> dict[str, str]:
    """`identity_file`: as `age-keygen` writes it. Raises `BackupRefused`."""
    age = _age()
    try:
        lines = identity_file.read_text(encoding="utf-8").splitlines()
        keys = [age.x25519.Identity.from_str(line) for line in lines if line.startswith("AGE-SECRET-KEY-")]
        opened = json.loads(age.decrypt(path.read_bytes(), keys))
    except OSError as error:
        raise BackupRefused(f"{error.filename} cannot be read: {error.strerror}") from None
    except (age.DecryptError, age.IdentityError, ValueError):
        raise BackupRefused(
            f"{path.name} is not encrypted to a key of {identity_file}: name the file that `age-keygen` wrote"
        ) from None
    return {Path(name).name: str(text) for name, text in opened.items()}


def write(secrets: dict[str, str], data_dir: Path) -> None:
    """Writes each into a file for its owner only. Raises `FileExistsError`."""
    for name, text in secrets.items():
        private_file(data_dir / name, text.rstrip("\n"))


def _age() -> Any:
    try:
        import pyrage
    except ModuleNotFoundError:
        raise BackupRefused(
            "encrypted secrets need the extra: pip install 'fairgate[backup]'; or give --no-secrets"
        ) from None
    return pyrage
