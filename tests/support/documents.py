"""The pages of the documentation, their blocks of code, and what they may name: commands, flags, routes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from litestar import Litestar

from gateway.app import handlers
from ops.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "runbooks").glob("*.md")),
]
RUNS = "run"
"""Second word of a fence whose block is run by a test; pages show the first one's colours only."""

_FENCE = re.compile(r"^```(?P<info>[^`\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n\n).)+?)(?<!`)\1(?!`)", re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=.*")
_NAME = re.compile(r"[a-z][a-z-]*")
_SHELL = frozenset({"|", "||", "&&", ";", ">", "<", "&"})


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    is_run: bool
    code: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in their order."""
    text = page.read_text()
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        language, _, mark = match["info"].partition(" ")
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page.name, line, language, mark == RUNS, match["code"]))
    return found


def spans(page: Path) -> list[str]:
    """What stands in backticks in a page's sentences and tables, on one line each."""
    return [" ".join(span.split()) for _, span in _SPAN.findall(_FENCE.sub("", page.read_text()))]


def commands(code: str) -> Iterator[list[str]]:
    """The words of each `fairgate` command in a block that is no program or file."""
    for line in code.replace("\\\n", " ").splitlines():
        if "fairgate " not in line:
            continue
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and _ASSIGNMENT.fullmatch(words[0]):
            words.pop(0)
        if words and words[0] == "fairgate":
            yield words[: next((n for n, word in enumerate(words) if word in _SHELL), len(words))]


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that these words name, the first being `fairgate`, and the words after it. Raises
    `UsageError` for one that there is not."""
    command: click.Command = cli
    context, rest = click.Context(cli), words[1:]
    while isinstance(command, click.Group) and rest and _NAME.fullmatch(rest[0]):
        found = command.get_command(context, rest[0])
        if found is None:
            raise click.UsageError(f"no command {rest[0]!r} in {' '.join(words)!r}")
        command, rest = found, rest[1:]
    return command, rest


def all_commands(group: click.Group = cli) -> Iterator[click.Command]:
    """Every command, groups included."""
    yield group
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from all_commands(command)
        else:
            yield command


def routes() -> set[tuple[str, str]]:
    """Method and path of everything that the application answers, documented or not."""
    found: set[tuple[str, str]] = set()
    app = Litestar(route_handlers=handlers(), openapi_config=None)
    for route in app.routes:
        for handler in getattr(route, "route_handlers", ()):
            found |= {
                (str(method), route.path_format or "/")
                for method in handler.http_methods
                if method != "OPTIONS"  # which the framework adds to every path
            }
    return found


def options_of(command: click.Command) -> set[str]:
    """The flags that it takes."""
    params = [param for param in command.params if isinstance(param, click.Option)]
    return {flag for param in params for flag in (*param.opts, *param.secondary_opts)} | {"--help"}
