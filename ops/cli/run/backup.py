"""`fairgate backup`: a copy of database and secrets, and its check."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click

from ops.cli.administer import actor
from ops.cli.base import Failure, Group, answer, config_file, settings_now
from ops.cli.inspect.audit_log import PUBLIC_KEY, parsed_keys

DIRECTORY = click.Path(file_okay=False, path_type=Path)
PG_DUMP = click.option(
    "--pg-dump",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="PostgreSQL's client, with pg_restore beside it.  [default: one of the server's version or newer]",
)


class OrCreate(Group):
    """Takes a copy where no word is one of its commands: `fairgate backup DIRECTORY`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        asks_for_help = args[:1] in ([], *([name] for name in ctx.help_option_names))
        return super().parse_args(
            ctx, args if asks_for_help or {*args} & {*self.commands} else ["create", *args]
        )


@click.group(cls=OrCreate, subcommand_metavar="[create] DIRECTORY | verify DIRECTORY")
def backup() -> None:
    """Copies of the database: take, check. A running server is not stopped; `fairgate restore` puts one back.

    \b
      fairgate backup /backups/monday --age age1…
      fairgate backup verify /backups/monday
      fairgate restore /backups/monday --data-dir NEW --identity key.txt
    """


@backup.command()
@click.argument("directory", type=DIRECTORY)
@click.option("--age", "recipient", metavar="RECIPIENT", help="Public age key that secrets are encrypted to.")
@click.option("--no-secrets", is_flag=True, help="Leave pepper, keys and settings out: kept elsewhere.")
@PG_DUMP
def create(directory: Path, recipient: str | None, no_secrets: bool, pg_dump: Path | None) -> None:
    """Copies the database as it is at one instant into DIRECTORY, with keys, settings and a manifest.

    What Redis has is not in it: it is computed from the ledger. The audit notes who took a copy. One that
    cannot be finished is removed.

    \b
    --json answers:
      {"release": "0.1.0", "schema": "0001", "at": "2026-01-01T12:00:00+00:00", "audit_size": 1812,
       "audit_root": "…", "public_key": "fairgate-audit/…+…+…", "last_ledger_id": 96000,
       "files": {"fairgate.db": "…"}, "format": 1}
    """
    if (recipient is None) is not no_secrets:
        raise click.UsageError("give --age, to encrypt pepper and keys, or --no-secrets, to leave them out")
    from ops.recovery import backup as backups

    who, kept = actor(), config_file()
    work = backups.create(
        settings_now(), directory, recipient, who.name, who.origin, config=kept, pg_dump=pg_dump
    )
    with failures():
        made = asyncio.run(work)
    answer(
        asdict(made),
        f"{directory}: {made.audit_size:,} rows of the audit, ledger up to {made.last_ledger_id}",
    )


@backup.command()
@click.argument("directory", type=DIRECTORY)
@PUBLIC_KEY
@click.option("--scratch-url", metavar="URL", help="Empty PostgreSQL database for the rows of a dump.")
@PG_DUMP
def verify(
    directory: Path, public_keys: tuple[str, ...], scratch_url: str | None, pg_dump: Path | None
) -> None:
    """Checks a backup without a server: the hash of each file, the ledger's rows, and the audit.

    Changes nothing. Without --public-key the audit is checked with the key that the backup names. A dump of
    PostgreSQL is put into --scratch-url, and stays there: drop that database then. Without it only files
    are checked, and `not_checked` names the rest.

    \b
    --json answers what `fairgate backup --json` does, and `not_checked`: ["ledger", "usage", "audit"] or [].
    """
    from ops.recovery import backup as backups

    with failures():
        made = backups.verify(directory, parsed_keys(public_keys), scratch_url, pg_dump)
    missed = ["ledger", "usage", "audit"] if made.is_dump and scratch_url is None else []
    text = f"{directory} is whole: taken {made.at}, {made.audit_size:,} rows of the audit"
    if missed:
        text = (
            f"{directory}: the files are whole, taken {made.at}; not checked: {', '.join(missed)}"
            " (give --scratch-url, an empty PostgreSQL database)"
        )
    answer(asdict(made) | {"not_checked": missed}, text)


@contextmanager
def failures() -> Iterator[None]:
    """Ends the command with what a backup or a restore refuses."""
    from ops.recovery.manifest import BackupRefused
    from ops.serving.datadir import DataDirRefused
    from tenants.errors import TenancyError

    try:
        yield
    except (BackupRefused, DataDirRefused, TenancyError) as error:
        raise Failure(str(error)) from None
