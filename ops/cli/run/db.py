"""`fairgate db`: the database schema: its version and migration."""

from __future__ import annotations

from dataclasses import asdict

import click

from ops.cli.base import Failure, answer, group, settings_now
from ops.settings.settings import Settings


@group()
def db() -> None:
    """The database schema: upgrade, downgrade, rights.

    \b
    `fairgate serve` creates or upgrades the database when it starts.
      fairgate db current
      fairgate db upgrade
      fairgate db upgrade --contract when no gateway of the release before serves
      fairgate db downgrade base     drops everything, data included
      fairgate db grant ROLE         PostgreSQL: the rights that a running server needs
    """


def _settings() -> Settings:
    from ops.serving import datadir

    settings = settings_now()
    try:
        datadir.ensure(settings.data_dir)
    except datadir.DataDirRefused as error:
        raise Failure(str(error)) from None
    return settings


def _report(settings: Settings, done: str) -> None:
    from migrations import runner

    found, head = runner.schema(settings.resolved_database_url), runner.head()
    text = "no Fairgate schema" if found.revision is None else f"revision {found.revision}"
    if runner.is_newer(found.revision):
        text += f" (of a later release: this program knows {head})"
    else:
        text += " (current)" if found.revision == head else f" (this program needs {head})"
    if found.oldest_release is not None:
        text += f", served by {found.oldest_release} and newer"
    text += "".join(f"; {each}" for each in found.backfills if not each.is_done)
    value = {"head": head, "is_current": found.revision == head, **asdict(found)}
    answer(value, f"{done}: {text}" if done else text)


def _run(action: str, settings: Settings, revision: str, *, contracts: bool = False) -> None:
    from migrations import runner
    from tenants.errors import TenancyError

    try:
        if action:
            getattr(runner, action)(settings.resolved_database_url, revision)
        done = f"{action}d" if action else ""
        if contracts:
            steps = runner.contract(settings.resolved_database_url, settings.gateway.gateway_stale_s)
            done += f"; contracted {', '.join(steps)}" if steps else "; no contract step is pending"
        _report(settings, done)
    except TenancyError as error:
        raise Failure(str(error)) from None


@db.command()
@click.argument("revision", default="head")
@click.option(
    "--contract",
    is_flag=True,
    help="Then removes what only older releases need. Refused while a gateway of one serves. There is no "
    "downgrade past it.",
)
def upgrade(revision: str, contract: bool) -> None:
    """Upgrades the database to REVISION (default: the newest that this program knows).

    \b
    --json answers:
      {"revision": "0001", "head": "0001", "is_current": true, "contracted": null, "oldest_release": null,
       "backfills": [{"revision": "0001", "rows": 2000, "is_done": false}]}
    """
    _run("upgrade", _settings(), revision, contracts=contract)


@db.command()
@click.argument("revision")
def downgrade(revision: str) -> None:
    """Downgrades the database to REVISION; `base` drops everything, data included.

    \b
    --json answers:
      {"revision": null, "head": "0001", "is_current": false, "contracted": null, "oldest_release": null,
       "backfills": [{"revision": "0001", "rows": 2000, "is_done": false}]}
    """
    _run("downgrade", _settings(), revision)


@db.command()
def current() -> None:
    """Shows the revision of the database.

    \b
    --json answers:
      {"revision": "0001", "head": "0001", "is_current": true, "contracted": null, "oldest_release": null,
       "backfills": [{"revision": "0001", "rows": 2000, "is_done": false}]}
    """
    _run("", _settings(), "")


@db.command()
@click.argument("role")
def grant(role: str) -> None:
    """Gives a PostgreSQL ROLE the rights that a running server needs, and no others.

    Run it with the URL of the tables' owner, and again after each upgrade. Servers then connect as ROLE: it
    cannot change or delete a row of audit, ledger or prices, nor take away the triggers that refuse it. A
    role that owns something here, is a superuser, or a member of the owner is refused.

    \b
    --json answers:
      {"role": "fairgate_server", "append_only": ["ledger", "counter_sets", "prices", "audit", …]}
    """
    from migrations import runner
    from tenants.errors import TenancyError
    from tenants.storage.server_role import APPEND_ONLY

    settings = settings_now()
    try:
        runner.grant(settings.resolved_database_url, role)
    except TenancyError as error:
        raise Failure(str(error)) from None
    answer(
        {"role": role, "append_only": list(APPEND_ONLY)},
        f"{role} may do what a running server needs; it adds to {', '.join(APPEND_ONLY)}, and changes nothing"
        " there",
    )
