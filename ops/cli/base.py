"""Parts that all commands share: common options, answers as text or JSON, errors and exit codes.

Exit code 0: success; 1: failed; 2: wrong usage or settings; 3: done, but not confirmed by every gateway yet.
Answers go to stdout, errors to stderr. Nothing here imports the engine, the gateway or torch, so that
`fairgate --help` is quick.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from ops.settings.settings import CONFIG_VARIABLE, BadSetting, Settings, load

if TYPE_CHECKING:
    from ops.pages.charts import Chart
    from ops.reporting import Part
    from tenants.resources.resource import Resource

FLAGS_KEY = "fairgate.flags"
JSON_KEY = "fairgate.json"
HTML_KEY = "fairgate.html"
LATE_KEY = "fairgate.late"
UNCONFIRMED = 3
"""Exit code of a change that some gateway has not confirmed."""


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


class CommonOption(click.Option):
    """An option of every command, described in the help of `fairgate` alone."""

    def __init__(self, name: str, metavar: str, words: str) -> None:
        super().__init__([name], metavar=metavar, expose_value=False, callback=_remember, help=words)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        return super().get_help_record(ctx) if ctx.parent is None else None


def common_options() -> list[click.Parameter]:
    return [
        CommonOption("--data-dir", "DIR", "Data directory.  [default: ./fairgate-data]"),
        CommonOption("--config", "FILE", "TOML file with settings (also FAIRGATE_CONFIG)."),
        CommonOption(
            "--database-url",
            "URL",
            "Database (also FAIRGATE_DATABASE_URL).  [default: SQLite in the data directory]",
        ),
    ]


def _name_common_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    common = [one for one in command.params if isinstance(one, CommonOption)]
    if ctx.parent is not None and common:
        formatter.write_paragraph()
        with formatter.indentation():
            names = ", ".join(f"{one.opts[0]} {one.metavar}" for one in common)
            formatter.write_text(f"Also {names}: see `fairgate --help`.")


def json_option() -> click.Parameter:
    return click.Option(
        ["--json"],
        is_flag=True,
        expose_value=False,
        callback=_remember_json,
        help="Answer with JSON on stdout.",
    )


def _remember_page(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    if value is None:
        return
    if not value.absolute().parent.is_dir():
        raise click.UsageError(f"there is no directory for {str(value)!r}")
    ctx.meta[HTML_KEY] = value


def html_option() -> click.Option:
    return click.Option(
        ["--html"],
        metavar="FILE",
        type=click.Path(path_type=Path, dir_okay=False),
        expose_value=False,
        callback=_remember_page,
        help="Also write a self-contained HTML page: charts, tables, all figures.",
    )


def page_file() -> Path | None:
    path: Path | None = click.get_current_context().meta.get(HTML_KEY)
    return path


class Command(click.Command):
    """A command with the common options, and `--json` unless it has its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        taken = {option for param in self.params for option in param.opts}
        extra = [option for option in common_options() if not taken & set(option.opts)]
        if "--json" not in taken:
            extra.append(json_option())
        self.params = [*self.params, *extra]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        _name_common_options(self, ctx, formatter)


class PageCommand(Command):
    """A command that has `--html` as well."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params = [*self.params, html_option()]


class Group(click.Group):
    """A group whose commands are imported on first use."""

    command_class = Command
    resources: tuple[Resource[Any], ...] | None = None
    """None: those that the product serves, imported on first use."""

    def __init__(self, *args: Any, lazy: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params = [*self.params, *common_options()]
        self.lazy = dict(lazy or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *self.lazy]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.lazy:
            module, _, attribute = self.lazy[cmd_name].partition(":")
            command: click.Command = getattr(importlib.import_module(module), attribute)
            return command
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Names the nearest command, also of those that are imported on first use."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            known = self.list_commands(ctx)
            if args[0] in known:
                raise
            raise click.UsageError(f"No such command {args[0]!r}.{nearest(args[0], known)}", ctx) from None

    def sections(self, ctx: click.Context) -> dict[str, list[str]]:
        """Its commands by the heading of its help."""
        return {"Commands": self.list_commands(ctx)}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """With the whole first sentence of each, where click cuts it at the line's end."""
        _name_common_options(self, ctx, formatter)
        sections = self.sections(ctx)
        widest = max(map(len, chain(*sections.values())), default=0)
        for heading, names in sections.items():
            commands = [(name, command) for name in names if (command := self.get_command(ctx, name))]
            rows = [(name.ljust(widest), command.get_short_help_str(1_000)) for name, command in commands]
            with formatter.section(heading):
                formatter.write_dl(rows)


def nearest(given: str, known: Iterable[str]) -> str:
    """` Did you mean 'tenant'?`; empty: nothing is near."""
    near = get_close_matches(given, list(known), n=3)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


Group.group_class = Group


def group(**kwargs: Any) -> Callable[[Callable[..., Any]], Group]:
    return click.group(cls=Group, **kwargs)


def wants_json() -> bool:
    return bool(click.get_current_context().meta.get(JSON_KEY))


def served_resources(root: click.Command | None = None) -> tuple[Resource[Any], ...]:
    """The nouns of a root command, of the current one without; by default those that the product serves."""
    from tenants.resources.all import RESOURCES

    root = root or click.get_current_context().find_root().command
    return root.resources if isinstance(root, Group) and root.resources is not None else RESOURCES


def config_file() -> Path | None:
    """The TOML file of flag or environment."""
    given = click.get_current_context().meta.get(FLAGS_KEY, {}).get("config")
    given = given or os.environ.get(CONFIG_VARIABLE)
    return Path(str(given)) if given else None


def settings_now(extra: Mapping[str, object] | None = None) -> Settings:
    """Settings from the flags seen so far, the environment and the file; usage error when one is bad."""
    flags = dict(click.get_current_context().meta.get(FLAGS_KEY, {}))
    flags |= {name: value for name, value in (extra or {}).items() if value is not None}
    flags.pop("config", None)
    try:
        return load(flags, os.environ, config_file())
    except BadSetting as error:
        raise click.UsageError(str(error)) from None


def answer(value: Any, text: Callable[[], None] | str, charts: Sequence[Chart] = ()) -> None:
    """Prints `value` as JSON with `--json`, else the text; with `--html` both go into a page below the
    charts. Where gateways have not confirmed a change, it says which (`not_in_force_on`), with exit code
    `UNCONFIRMED`."""
    context = click.get_current_context()
    if (path := page_file()) is not None:
        write_page(path, value, text, charts)
    late: list[str] = context.meta.get(LATE_KEY, [])
    if wants_json():
        shown = {**value, "not_in_force_on": late} if late else value
        click.echo(json.dumps(shown, indent=2, default=str))
    elif isinstance(text, str):
        click.echo(text)
    else:
        text()
    if late:
        names = ", ".join(late)
        click.echo(f"not in force yet at these gateways, which have not confirmed it: {names}", err=True)
        context.exit(UNCONFIRMED)


@contextmanager
def opened(output: Path | None) -> Iterator[TextIO]:
    """Stdout, or a file that takes its name once it is complete. Raises `Failure` if it cannot be written."""
    if output is None:
        yield sys.stdout
        return
    partial = output.with_name(output.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            yield file
        partial.replace(output)
    except OSError as error:
        raise Failure(f"{output} cannot be written: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)


def write_page(
    path: Path, value: Any, text: Callable[[], None] | str, charts: Sequence[Chart] = (), title: str = ""
) -> None:
    """Raises `Failure` where the file cannot be written."""
    from ops.pages.page import ReportPage, html
    from ops.reporting import recorded

    parts: list[Part] = recorded(text) if callable(text) else [text]
    page = ReportPage(title or click.get_current_context().command_path, parts, charts, exact=value)
    try:
        path.write_text(html(page), encoding="utf-8")
    except OSError as error:
        raise Failure(f"{error.filename}: cannot be written ({error.strerror})") from None
