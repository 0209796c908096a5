"""No page names a command, a flag, a route, a setting or a variable that there is not."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from engine.vllm_plugin.options import VARIABLES
from ops.settings.settings import CONFIG_VARIABLE, FILE_SUFFIX, IGNORED_PREFIX, SETTINGS, load
from tests.support.documents import (
    PAGES,
    ROOT,
    all_commands,
    blocks,
    command_of,
    commands,
    options_of,
    routes,
    spans,
)

OF_OTHERS = {
    "--allowed-media-domains": "vLLM",
    "--enable-auto-tool-choice": "vLLM",
    "--jinja": "llama.cpp",
    "--mmproj": "llama.cpp",
    "--tool-call-parser": "vLLM, SGLang",
    "--enable-optimizations": "Python's own build",
    "--max-loras": "vLLM",
    "--max-num-seqs": "vLLM",
    "--no-deps": "pip",
    "--scheduler-cls": "vLLM",
    "--scheduling-policy": "vLLM",
    "--target": "pip",
}
"""Flags of other programs."""
OF_THE_FRAMEWORK = {("GET", "/docs")}
OF_OTHER_SERVERS = {"/health"}
"""Routes that upstreams have."""

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def plain(path: str) -> str:
    """A route whatever its parameters are called."""
    return re.sub(r"\{[^}]*\}", "{}", path).rstrip(".")


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
    known = {(method, plain(path)) for method, path in routes() | OF_THE_FRAMEWORK}
    methods = "|".join(sorted({method for method, _ in known}))
    text = page.read_text()
    named = {(method, plain(path)) for method, path in re.findall(rf"\b({methods}) (/[\w/{{}}.-]*)", text)}
    assert named - known == set()
    # Without a method: a route, or what several begin with.
    paths = {path for _, path in known} | OF_OTHER_SERVERS
    alone = {plain(span) for span in spans(page) if re.fullmatch(r"/[\w/{}-]+", span)}
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
    variables = {row.variable for row in SETTINGS} | {CONFIG_VARIABLE} | set(VARIABLES)
    variables |= {row.variable + FILE_SUFFIX for row in SETTINGS if row.secret}
    shown = set(re.findall(r"\bFAIRGATE_[A-Z_]+", page.read_text()))
    assert {name for name in shown if not name.startswith(IGNORED_PREFIX)} - variables == set()


@by_page
def test_every_file_of_settings_loads(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.language == "toml":
            config = tmp_path / "fairgate.toml"
            config.write_text(block.code)
            load({}, {}, config)


def test_every_error_code_exists() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "gateway").rglob("*.py"))
    rows = re.findall(r"^\| [\d, ]+ \| (.*?) \|", (ROOT / "docs" / "using-the-api.md").read_text(), re.M)
    codes = {code for row in rows for code in re.findall(r"`(\w+)`", row)}
    assert len(codes) > 20
    # Of stores the code is made from the store's name.
    assert {
        code
        for code in codes
        if f'"{code}"' not in sources and f'"{code.removesuffix("_unavailable")}"' not in sources
    } == set()
