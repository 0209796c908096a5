"""`fairgate backup`: a copy of database and secrets, its check, and a restore from it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click

from ops.cli.administer import actor
from ops.cli.base import Failure, answer, group, settings_now
from ops.cli.inspect.audit_log import FILE, PUBLIC_KEY, parsed_keys, text_of

T = TypeVar("T")
DIRECTORY = click.Path(file_okay=False, path_type=Path)


@group()
def backup() -> None:
    """Copies of the database: take, check, restore. A running server is not stopped.

    \b
      fairgate backup create /backups/monday --age age1…
      fairgate backup verify /backups/monday
      fairgate backup restore /backups/monday --data-dir NEW --identity key.txt
    """


@backup.command()
@click.argument("directory", type=DIRECTORY)
@click.option("--age", "recipient", metavar="RECIPIENT", help="Public age key that secrets are encrypted to.")
@click.option("--no-secrets", is_flag=True, help="Leave pepper and keys out: they are kept elsewhere.")
def create(directory: Path, recipient: str | None, no_secrets: bool) -> None:
    """Copies the SQLite database as it is at one instant into DIRECTORY, with keys and a manifest.

    What Redis has is not in it: it is computed from the ledger. The audit notes who took a copy.

    \b
    --json answers:
      {"release": "0.1.0", "schema": "0001", "at": "2026-01-01T12:00:00+00:00", "audit_size": 1812,
       "audit_root": "…", "public_key": "fairgate-audit/…+…+…", "last_ledger_id": 96000,
       "files": {"fairgate.db": "…"}, "format": 1}
    """
    if (recipient is None) is not no_secrets:
        raise click.UsageError("give --age, to encrypt pepper and keys, or --no-secrets, to leave them out")
    from ops.recovery import backup as backups

    who = actor()
    made = _run(backups.create(settings_now(), directory, recipient, who.name, who.origin))
    answer(
        asdict(made),
        f"{directory}: {made.audit_size:,} rows of the audit, ledger up to {made.last_ledger_id}",
    )


@backup.command()
@click.argument("directory", type=DIRECTORY)
@PUBLIC_KEY
def verify(directory: Path, public_keys: tuple[str, ...]) -> None:
    """Checks a backup without a server: the hash of each file, the ledger's rows, and the audit.

    Changes nothing. Without --public-key the audit is checked with the key that the backup names.

    \b
    --json answers what `fairgate backup create --json` does.
    """
    from ops.recovery import backup as backups

    async def check() -> dict[str, Any]:
        return asdict(backups.verify(directory, parsed_keys(public_keys)))

    found = _run(check())
    answer(found, f"{directory} is whole: taken {found['at']}, {found['audit_size']:,} rows of the audit")


@backup.command()
@click.argument("directory", type=DIRECTORY)
@click.option("--identity", type=FILE, help="File of the age key, as `age-keygen` writes it.")
@click.option("--secrets", type=DIRECTORY, help="Directory with pepper and audit-key, kept elsewhere.")
@click.option("--checkpoint", type=FILE, help="Newest checkpoint that a witness keeps: says what was lost.")
@click.option("--without-old-key", is_flag=True, help="Go on though the old audit-key is lost.")
def restore(
    directory: Path,
    identity: Path | None,
    secrets: Path | None,
    checkpoint: Path | None,
    without_old_key: bool,
) -> None:
    """Checks a backup and puts it into --data-dir, which must be empty or not exist.

    The audit goes on under a new name and key; its next row says so, and both keys sign it. Give the new
    public key to auditors. Counters are computed from the ledger at the first start: give an empty Redis.

    \b
    --json answers:
      {"public_key": "fairgate-audit/…+…+…", "before": "fairgate-audit/…+…+…", "backup_at": "…",
       "size": 1812, "root": "…", "last_ledger_id": 96000, "lost_rows": {"first": 1812, "last": 1830}}
    """
    if secrets is not None and identity is not None:
        raise click.UsageError("give --identity, or --secrets, not both")
    from ops.recovery import restore as restores
    from ops.recovery import secret_files

    settings, who = settings_now(), actor()
    if settings.database_url:
        raise click.UsageError("a backup of SQLite is restored into --data-dir: leave out the database's URL")

    async def put() -> dict[str, Any]:
        given = None if secrets is None else secret_files.collect(secrets)
        kept = None if checkpoint is None else text_of(checkpoint)
        place = settings.data_dir
        return await restores.restore(
            *(directory, place, given, identity, kept, who.name, who.origin), without_old_key=without_old_key
        )

    done = _run(put())
    lost = done["lost_rows"]
    text = f"restored as of {done['backup_at']}; the audit goes on from row {done['size']:,}, signed by"
    said = f"lost: its rows {lost['first']:,} to {lost['last']:,}" if lost else ""
    answer(done, "\n".join(filter(None, (text, done["public_key"], said))))


def _run(work: Coroutine[Any, Any, T]) -> T:
    from ops.recovery.manifest import BackupRefused
    from ops.serving.datadir import DataDirRefused
    from tenants.errors import TenancyError

    try:
        return asyncio.run(work)
    except (BackupRefused, DataDirRefused, TenancyError) as error:
        raise Failure(str(error)) from None
