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
    from ops.serving.processes.first_start import Started

ALREADY_COMMON = {"data_dir", "database_url"}
HELP_ALL = "fairgate.help_all"
SHORT_HELP = {
    *(
        "--host",
        "--port",
        "--workers",
        "--model",
        "--model-name",
        "--redis-url",
        "--prices",
        "--upstreams",
        "--log-level",
    ),
    *("--policy", "--engine-device", "--engine-threads", "--engine-max-sequences", "--admin-listen"),
}
"""What a newcomer needs."""
SHORT_FLAGS = {"engine.context": "--context", "engine.count": "--engines"}
"""Further flags of settings that messages and pages ask to be set."""


class SettingOption(click.Option):
    """A setting's flag, which the short help may leave out."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        is_shown = ctx.meta.get(HELP_ALL) or self.opts[0] in SHORT_HELP
        return super().get_help_record(ctx) if is_shown else None


def _help_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[HELP_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _option(row: SettingInfo) -> click.Option:
    """The flag of a setting; its value stays text, so that all sources are parsed by the same rules."""
    default = f"  [default: {row.default_text}]" if row.default_text and not row.secret else ""
    return SettingOption(
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
    """Starts the gateway and the engine on this machine.

    \b
    The first start creates the data directory, the database and an admin key (shown once). Open the link
    that it prints in a browser to set up the console. Ctrl-C or SIGTERM ends it.
      fairgate serve
      fairgate serve --port 9000 --data-dir /var/lib/fairgate --model /models/qwen3-0.6b
      fairgate serve --workers 4 --database-url postgresql://fairgate@db/fairgate --redis-url redis://cache/0
      FAIRGATE_ENGINE_THREADS=8 fairgate serve --config fairgate.toml
    Every flag is also an environment variable (--engine-threads is FAIRGATE_ENGINE_THREADS) and a key of the
    TOML file ([engine] threads). Flags win over the environment, the environment over the file.
    `fairgate serve --help-all` lists all settings.
    --json prints one line once the server is up:
      {"url": "http://127.0.0.1:8000", "docs_url": "http://127.0.0.1:8000/docs",
       "admin_url": "http://127.0.0.1:9000 with --admin-listen, else null", "model": "fairgate-demo",
       "data_dir": "/…/fairgate-data", "owner_key_file": "/…/owner-key at the first start, else null",
       "set_up_link_file": "/…/set-up-link as long as the console has no owner, else null",
       "workers": 1, "curl": "curl http://127.0.0.1:8000/v1/chat/completions …"}
    On a terminal it prints the owner key and the link with which the console's first owner sets a name and a
    password. The link works once, within a day; each start makes a new one until it is used. With --json, or
    where stdout is a log or a pipe, both go to the files owner-key and set-up-link in the data directory,
    readable by its user only: copy them and delete the files.
    """
    named = {name.replace("__", "."): value for name, value in flags.items()}
    settings = settings_now(named | _policy_options(policy_option))
    as_json = wants_json()
    from ops.serving.serve import serve as run

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
            "workers": started.workers,
            "curl": _curl(started, key_file),
        }
        print(json.dumps(value), flush=True)
        return
    where = shlex.quote(str(started.data_dir))
    lines = [f"Open {started.console_url} in a browser."]
    if link_file:
        lines = [f"To set up the console, open the link in {link_file} in a browser (once, within a day)."]
    elif started.set_up_link:
        lines = [f"To set up the console, open {started.set_up_link} in a browser (once, within a day)."]
    lines.append(f"Fairgate serves {started.model} at {started.url}/v1")
    if key_file:
        lines += [
            f"  owner key   in {key_file}",
            "              (all scopes; copy it and delete the file)",
        ]
    elif started.owner_key:
        lines += [f"  owner key   {started.owner_key}", "              (all scopes; shown this once)"]
    if started.admin_url:
        lines.append(f"  admin API   {started.admin_url}/admin/v1")
    lines += [
        f"  try it      {_curl(started, key_file)}",
        f"  API page    {started.docs_url}",
        f"  a tenant    fairgate tenant create acme --data-dir {where}",
        f"  its key     fairgate key create --tenant acme --data-dir {where}",
    ]
    print("\n".join(lines), flush=True)


def _curl(started: Started, key_file: str | None) -> str:
    """One command that answers. It names a key only by its file, or by the variable KEY."""
    key = f"$(cat {shlex.quote(key_file)})" if key_file else "$KEY"
    body = {"model": started.model, "messages": [{"role": "user", "content": "Count from 3 to 9."}]}
    return (
        f'curl {started.url}/v1/chat/completions -H "Authorization: Bearer {key}"'
        f" -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )


serve = Command(
    "serve",
    callback=_serve,
    help=_serve.__doc__,
    params=[
        *(_option(row) for row in SETTINGS if row.name not in ALREADY_COMMON and " " not in row.flag),
        SettingOption(
            [POLICY_OPTION_FLAG],
            metavar="NAME=VALUE",
            multiple=True,
            help="An option of the policy, such as slots=16 (repeat). Options: "
            + ", ".join(OPTIONS)
            + " (`fairgate policy explain NAME` shows their bounds and defaults).",
        ),
        click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_help_all,
            help=f"Show all {len(SETTINGS)} settings and exit.",
        ),
    ],
)
