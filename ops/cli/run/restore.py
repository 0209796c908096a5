"""`fairgate restore`: a backup put into an empty place."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from ops.cli.administer import actor
from ops.cli.base import Command, answer, settings_now
from ops.cli.inspect.audit_log import FILE, text_of
from ops.cli.run.backup import DIRECTORY, PG_DUMP, failures


@click.command(cls=Command)
@click.argument("directory", type=DIRECTORY)
@click.option("--identity", type=FILE, help="File of the age key, as `age-keygen` writes it.")
@click.option("--secrets", type=DIRECTORY, help="Directory with pepper and audit-key, kept elsewhere.")
@click.option("--checkpoint", type=FILE, help="Newest checkpoint that a witness keeps: says what was lost.")
@click.option("--without-old-key", is_flag=True, help="Go on though the old audit-key is lost.")
@PG_DUMP
def restore(
    directory: Path,
    identity: Path | None,
    secrets: Path | None,
    checkpoint: Path | None,
    without_old_key: bool,
    pg_dump: Path | None,
) -> None:
    """Checks a backup and puts it into an empty place.

    --data-dir must be empty or not exist, and for PostgreSQL the database of --database-url without tables.
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
    url = settings.resolved_database_url if settings.database_url else ""

    with failures():
        given = None if secrets is None else secret_files.collect(secrets)
        kept = None if checkpoint is None else text_of(checkpoint)
        work = restores.restore(
            *(directory, settings.data_dir, given, identity, kept, who.name, who.origin),
            url=url,
            pg_dump=pg_dump,
            without_old_key=without_old_key,
        )
        done = asyncio.run(work)
    lost = done["lost_rows"]
    text = f"restored as of {done['backup_at']}; the audit goes on from row {done['size']:,}, signed by"
    said = f"lost: its rows {lost['first']:,} to {lost['last']:,}" if lost else ""
    found = settings.data_dir / secret_files.SETTINGS_FILE
    where = f"its settings: {found} (--config)" if found.exists() else ""
    answer(done, "\n".join(filter(None, (text, done["public_key"], said, where))))
