"""Options, progress and exit codes that the commands of `fairgate bench` share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ops.cli.base import Command, PageCommand, answer

if TYPE_CHECKING:
    from ops.pages.charts import Chart

EXIT_INVALID = 3

MODEL_OPTION = click.option("--model", metavar="DIR", help="Model directory.  [default: the shipped model]")
PEERS_DIR_OPTION = click.option(
    "--peers-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".bench-peers"),
    show_default=True,
    help="Where 'make bench-peers' put them.",
)
JSON_FILE_OPTION = click.option(
    "--json-file", type=click.Path(path_type=Path, dir_okay=False), help="Also write the JSON report there."
)


def command(name: str | None = None) -> Callable[[Callable[..., Any]], Command]:
    return click.command(name, cls=PageCommand)


def whole(*names: str, least: int, most: int | None = None, **more: Any) -> Callable[[Any], Any]:
    """An option that is a whole number from `least` to `most`; its default is shown."""
    return click.option(*names, type=click.IntRange(least, most), show_default="default" in more, **more)


def listed(*names: str, parse: Callable[..., Any], **more: Any) -> Callable[[Any], Any]:
    """An option that is a list with commas; its default is shown."""
    return click.option(*names, callback=parse, show_default="default" in more, **more)


def verdict(
    report: dict[str, Any],
    show: Callable[[], None],
    json_file: Path | None = None,
    charts: Sequence[Chart] = (),
) -> None:
    """Answers; exit code 1 where a promise was not kept, 3 where the run was invalid (`ok` is None)."""
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    answer(report, show, charts)
    if not report["ok"]:
        raise click.exceptions.Exit(EXIT_INVALID if report["ok"] is None else 1)


def tell(what: str) -> None:
    click.echo(f"measuring: {what}", err=True)


def names_given(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """A list with commas; None stays None."""
    if value is None:
        return None
    return tuple(name.strip() for name in value.split(",") if name.strip())


def counts_given(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Whole numbers of at least 1, with commas."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= 1_000_000 for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of numbers from 1 to 1000000 such as 1000,10000")
    return tuple(int(part) for part in parts)
