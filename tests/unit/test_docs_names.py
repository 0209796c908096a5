"""No page names a command, a flag, a route, a setting or a variable that there is not."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from litestar import Litestar

from gateway.app import HANDLERS
from ops.settings.settings import CONFIG_VARIABLE, IGNORED_PREFIX, SETTINGS, load
from tests.support.documents import (
    PAGES,
    all_commands,
    blocks,
    command_of,
    commands,
    options_of,
    spans,
)

OF_OTHERS = {
    "--enable-optimizations": "Python's own build",
    "--no-deps": "pip",
    "--target": "pip",
}
"""Flags of other programs."""
DOCS_PAGES = {"/docs", "/docs/openapi.json"}
OF_OTHER_SERVERS = {"/health"}
"""Routes that upstreams have."""

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def routes() -> set[tuple[str, str]]:
    """Method and path of every route, each parameter as `{}`."""
    app = Litestar(route_handlers=HANDLERS, openapi_config=None)
    found = {("GET", path) for path in DOCS_PAGES}
    for route in app.routes:
        for handler in getattr(route, "route_handlers", ()):
            path = re.sub(r"\{[^}]*\}", "{}", route.path_format or "/")
            found |= {(str(method), path) for method in handler.http_methods}
    return found


def test_what_is_shown_as_a_program_runs() -> None:
    """`tests/e2e/test_docs_run.py` runs what is marked; what is not to be run has no language."""
    unmarked = [
        f"{block.page}:{block.line}: write ```{block.language} run, or no language"
        for page in PAGES
        for block in blocks(page)
        if block.language in ("bash", "sh", "shell", "console", "python") and not block.is_run
    ]
    indented = [
        f"{page.name}: {line.strip()}"
        for page in PAGES
        for line in page.read_text().splitlines()
        if line.startswith("    fairgate ")
    ]
    assert unmarked + indented == []


@by_page
def test_every_command_in_a_block_is_understood(page: Path) -> None:
    wrong: list[str] = []
    for block in blocks(page):
        for words in commands(block.code) if block.language in ("", "bash") else ():
            try:
                command, rest = command_of(words)
                command.make_context(words[-1], rest)
            except click.ClickException as error:
                wrong.append(f"line {block.line}: {' '.join(words)}: {error.format_message()}")
    assert wrong == []


@by_page
def test_every_command_in_a_sentence_exists_with_its_flags(page: Path) -> None:
    wrong: list[str] = []
    for span in spans(page):
        if span == "fairgate" or not span.startswith("fairgate "):
            continue
        try:
            command, rest = command_of(span.split())
        except click.UsageError as error:
            wrong.append(error.format_message())
            continue
        flags = {word.partition("=")[0].strip("[],.") for word in rest if word.strip("[").startswith("--")}
        wrong += [f"{span!r} has no {flag}" for flag in sorted(flags - options_of(command))]
    assert wrong == []


@by_page
def test_every_flag_that_stands_alone_is_some_commands(page: Path) -> None:
    known = set(OF_OTHERS).union(*map(options_of, all_commands()))
    named = {re.split(r"[ =/|,]", span)[0] for span in spans(page) if span.startswith("--")}
    assert named - known == set()


@by_page
def test_every_route_exists(page: Path) -> None:
    known = routes()
    methods = "|".join(sorted({method for method, _ in known}))
    text = page.read_text()
    named = {
        (method, re.sub(r"\{[^}]*\}", "{}", path).rstrip(".,:;)"))
        for method, path in re.findall(rf"\b({methods}) (/[\w/{{}}.-]*)", text)
    }
    assert named - known == set()
    # Without a method: a route, or what several begin with.
    paths = {path for _, path in known} | OF_OTHER_SERVERS
    alone = {re.sub(r"\{[^}]*\}", "{}", span) for span in spans(page) if re.fullmatch(r"/[\w/{}-]+", span)}
    assert {path for path in alone if not any(each.startswith(path) for each in paths)} == set()


@by_page
def test_every_setting_and_every_variable_exists(page: Path) -> None:
    names = {row.name for row in SETTINGS}
    named = {
        match[0]
        for span in spans(page)
        if (match := re.match(r"(gateway|engine|policy)\.[a-z_]+(?=$|[ =:])", span)) is not None
    }
    assert {name for name in named if not name.endswith(".py")} - names == set()
    variables = {row.variable for row in SETTINGS} | {CONFIG_VARIABLE}
    shown = set(re.findall(r"\bFAIRGATE_[A-Z_]+", page.read_text()))
    assert {name for name in shown if not name.startswith(IGNORED_PREFIX)} - variables == set()


@by_page
def test_every_file_of_settings_loads(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.language == "toml":
            config = tmp_path / "fairgate.toml"
            config.write_text(block.code)
            load({}, {}, config)
