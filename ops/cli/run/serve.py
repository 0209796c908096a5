"""`fairgate serve`: gateway and engine on one machine."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from engine.scheduling.options import OPTIONS
from ops.cli.base import Command, settings_now, wants_json
from ops.serving.datadir import forget_set_up_link, write_owner_key, write_set_up_link
from ops.settings.settings import POLICY_OPTION_FLAG, SETTINGS, SettingInfo

if TYPE_CHECKING:
    from ops.serving.serve import Started

ALREADY_COMMON = {"data_dir", "database_url"}
SHORT_FLAGS = {"engine.context": "--context", "engine.count": "--engines"}
"""Further flags of settings that messages and pages ask to be set."""


def _option(row: SettingInfo) -> click.Option:
    """The flag of a setting; its value stays text, so that all sources are parsed by the same rules."""
    default = f"  [default: {row.default_text}]" if row.default_text and not row.secret else ""
    return click.Option(
        [*(flag for flag in (row.flag, SHORT_FLAGS.get(row.name)) if flag), row.name.replace(".", "__")],
        metavar="VALUE",
        help=f"{row.help} Takes {row.kind.accepts}.{default}",
    )


def _policy_options(given: tuple[str, ...]) -> dict[str, str]:
    """Settings of `NAME=VALUE` texts."""
    options: dict[str, str] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator:
            raise click.UsageError(
                f"{POLICY_OPTION_FLAG} {text!r} is not NAME=VALUE; `fairgate policy explain NAME` lists the"
                " options"
            )
        options[f"policy.{name.strip().replace('-', '_')}"] = value
    return options


def _serve(policy_option: tuple[str, ...], **flags: Any) -> None:
    """Starts gateway and engine, and serves until SIGTERM or Ctrl-C.

    \b
    On its first start it creates the data directory, the database and an owner admin key (shown once).
      fairgate serve
      fairgate serve --port 9000 --data-dir /var/lib/fairgate --model /models/qwen3-0.6b
      fairgate serve --database-url postgresql://fairgate@db/fairgate --redis-url redis://cache/0
      FAIRGATE_ENGINE_THREADS=8 fairgate serve --config fairgate.toml
    Every flag below is also an environment variable (--engine-threads is FAIRGATE_ENGINE_THREADS) and a key
    of the TOML file ([engine] threads). Flags win over the environment, the environment over the file.
    --json prints one line once the server is up:
      {"url": "http://127.0.0.1:8000", "docs_url": "http://127.0.0.1:8000/docs",
       "admin_url": "http://127.0.0.1:9000 with --admin-listen, else null", "model": "fairgate-demo",
       "data_dir": "/…/fairgate-data", "owner_key_file": "/…/owner-key at the first start, else null",
       "set_up_link_file": "/…/set-up-link as long as the console has no owner, else null"}
    The owner key is shown on a terminal, and so is the link by which the console's first owner sets a name
    and a password: it works once, within a day, and each start makes a new one until it was used. Otherwise
    (--json, a log, a pipe) they go into the files owner-key and set-up-link of the data directory, readable
    by its user only: take them from there and delete the files.
    """
    named = {name.replace("__", "."): value for name, value in flags.items()}
    settings = settings_now(named | _policy_options(policy_option))
    from ops.serving.serve import serve as run

    as_json = wants_json()
    sys.exit(run(settings, lambda started: _announce(started, as_json=as_json)))


def _announce(started: Started, *, as_json: bool) -> None:
    key_file = link_file = None
    is_kept = as_json or not sys.stdout.isatty()  # a log or a pipe keeps what it is sent
    if started.owner_key and is_kept:
        key_file = str(write_owner_key(started.data_dir, started.owner_key))
    if started.set_up_link is None or not is_kept:
        forget_set_up_link(started.data_dir)
    else:
        link_file = str(write_set_up_link(started.data_dir, started.set_up_link))
    if as_json:
        value = {
            "url": started.url,
            "docs_url": started.docs_url,
            "admin_url": started.admin_url,
            "model": started.model,
            "data_dir": str(started.data_dir),
            "owner_key_file": key_file,
            "set_up_link_file": link_file,
        }
        print(json.dumps(value), flush=True)
        return
    where = shlex.quote(str(started.data_dir))
    lines = [f"Fairgate serves {started.model} at {started.url}/v1"]
    if key_file:
        lines += [
            f"  owner key   in {key_file}",
            "              (all scopes; take it from there and delete the file)",
        ]
    elif started.owner_key:
        lines += [f"  owner key   {started.owner_key}", "              (all scopes; shown this once)"]
    if started.admin_url:
        lines.append(f"  admin API   {started.admin_url}/admin/v1")
    if started.set_up_link:
        lines += [
            f"  console     {f'set-up link in {link_file}' if link_file else started.set_up_link}",
            "              (makes its first owner; works once, within a day)",
        ]
    lines += [
        f"  API page    {started.docs_url}",
        f"  a tenant    fairgate tenant create acme --data-dir {where}",
        f"  its key     fairgate key create --tenant acme --data-dir {where}",
    ]
    print("\n".join(lines), flush=True)


serve = Command(
    "serve",
    callback=_serve,
    help=_serve.__doc__,
    params=[
        *(_option(row) for row in SETTINGS if row.name not in ALREADY_COMMON and " " not in row.flag),
        click.Option(
            [POLICY_OPTION_FLAG],
            metavar="NAME=VALUE",
            multiple=True,
            help="An option of the policy, such as slots=16; may be given several times. Options: "
            + ", ".join(OPTIONS)
            + " (`fairgate policy explain NAME` tells their bounds and defaults).",
        ),
    ],
)
