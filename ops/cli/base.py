"""Parts that all commands share: common options, answers as text or JSON, errors and exit codes.

Exit code 0: done; 1: failed; 2: wrong usage or settings. Answers go to stdout, errors to
stderr. Nothing here imports the engine, the gateway or torch, so that `fairgate --help` is quick.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from ops.settings.settings import BadSetting, Settings, load

FLAGS_KEY = "fairgate.flags"
JSON_KEY = "fairgate.json"


class Failure(click.ClickException):
    """A failure: one line on stderr, exit code 1."""

    exit_code = 1


def _remember(ctx: click.Context, param: click.Parameter, value: object) -> None:
    """Common options may stand at the root, the group or the command; the innermost wins."""
    if value is not None and param.name is not None:
        ctx.meta.setdefault(FLAGS_KEY, {})[param.name] = value


def _remember_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[JSON_KEY] = True


def common_options() -> list[click.Parameter]:
    """Options of every command."""
    return [
        click.Option(
            ["--data-dir"],
            metavar="DIR",
            expose_value=False,
            callback=_remember,
            help="Data directory.  [default: ./fairgate-data]",
        ),
        click.Option(
            ["--config"],
            metavar="FILE",
            expose_value=False,
            callback=_remember,
            help="TOML file with settings (also FAIRGATE_CONFIG).",
        ),
        click.Option(
            ["--database-url"],
            metavar="URL",
            expose_value=False,
            callback=_remember,
            help="Database (also FAIRGATE_DATABASE_URL).  [default: SQLite in the data directory]",
        ),
    ]


def json_option() -> click.Parameter:
    """The option `--json`."""
    return click.Option(
        ["--json"],
        is_flag=True,
        expose_value=False,
        callback=_remember_json,
        help="Answer with JSON on stdout.",
    )


class Command(click.Command):
    """A command with the common options, and `--json` unless it has its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        taken = {option for param in self.params for option in param.opts}
        extra = [option for option in common_options() if not taken & set(option.opts)]
        if "--json" not in taken:
            extra.append(json_option())
        self.params = [*self.params, *extra]


class Group(click.Group):
    """A group whose commands are imported on first use."""

    command_class = Command

    def __init__(self, *args: Any, lazy: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params = [*self.params, *common_options()]
        self.lazy = dict(lazy or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they were declared."""
        return [*self.commands, *self.lazy]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports `module:attribute` on first use."""
        if cmd_name in self.lazy:
            module, _, attribute = self.lazy[cmd_name].partition(":")
            command: click.Command = getattr(importlib.import_module(module), attribute)
            return command
        return super().get_command(ctx, cmd_name)


Group.group_class = Group


def group(**kwargs: Any) -> Callable[[Callable[..., Any]], Group]:
    """Declares a command group."""
    return click.group(cls=Group, **kwargs)


def wants_json() -> bool:
    """Whether `--json` was given."""
    return bool(click.get_current_context().meta.get(JSON_KEY))


def settings_now(extra: Mapping[str, object] | None = None) -> Settings:
    """Settings from the flags seen so far, the environment and the file; usage error when one is bad."""
    flags = dict(click.get_current_context().meta.get(FLAGS_KEY, {}))
    flags |= {name: value for name, value in (extra or {}).items() if value is not None}
    config = flags.pop("config", None)
    try:
        return load(flags, os.environ, Path(str(config)) if config is not None else None)
    except BadSetting as error:
        raise click.UsageError(str(error)) from None


def ask_server(method: str, path: str, body: object = None) -> dict[str, Any] | None:
    """Answer of the server that runs on the data directory, asked as its operator; None: none runs. Raises
    `Failure` with what it says is wrong."""
    import httpx

    from ops.serving import datadir

    server = datadir.running_server(settings_now().data_dir)
    if server is None:
        return None
    try:
        response = httpx.request(
            method,
            f"{server.url}{path}",
            headers={"authorization": f"Bearer {server.control_token}"},
            json=body,
            timeout=30.0,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Failure(f"the server at {server.url} does not answer: {error}") from None
    shown: dict[str, Any] = response.json()
    if response.status_code != 200:
        raise Failure(str(shown["error"]["message"]))
    return shown


def answer(value: Any, text: Callable[[], None] | str) -> None:
    """Prints `value` as JSON with `--json`, else the text."""
    if wants_json():
        click.echo(json.dumps(value, indent=2, default=str))
    elif isinstance(text, str):
        click.echo(text)
    else:
        text()
