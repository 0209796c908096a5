"""Files of the wheel, by the build backend's list, and what `fairgate bench` says where it is not in it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hatchling.builders.wheel import WheelBuilder

from ops.cli.main import cli
from tenants.outbox.kinds import BY_SUBJECT

ROOT = Path(__file__).parents[3]
FOR_DEVELOPERS = ("ops/bench", "ops/demo/training", "ops/pictures.py")
MOST_LINES = 142_200


@pytest.fixture(scope="module")
def modules() -> dict[str, str]:
    """Path in the wheel -> text of every Python file."""
    paths = [
        included.distribution_path
        for included in WheelBuilder(str(ROOT)).recurse_included_files()
        if included.distribution_path.endswith(".py")
    ]
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in paths}


def test_what_serves_is_in_the_wheel_and_what_measures_is_not(modules: dict[str, str]) -> None:
    assert {
        "ops/cli/main.py", "ops/cli/bench/main.py", "gateway/app.py", "ops/demo/prompts/instructions.py",
    } <= set(modules)  # fmt: skip
    assert [path for path in modules if path.startswith(FOR_DEVELOPERS)] == []
    assert sum(text.count("\n") for text in modules.values()) <= MOST_LINES


def test_the_runbooks_are_in_the_wheel() -> None:
    built = {
        path.removeprefix("tenants/outbox/runbook_pages/")
        for path in (each.distribution_path for each in WheelBuilder(str(ROOT)).recurse_included_files())
        if path.startswith("tenants/outbox/runbook_pages/")
    }
    assert built == {f"{subject}.md" for subject in BY_SUBJECT}


def test_nothing_in_the_wheel_needs_what_is_not_in_it(modules: dict[str, str]) -> None:
    absent = tuple(path.removesuffix(".py").replace("/", ".") for path in FOR_DEVELOPERS)
    needed = [
        (path, node.lineno)
        for path, text in modules.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        and f"{node.module}.".startswith(tuple(f"{name}." for name in absent))
        # The commands of benchmarks import them when they run.
        if not (path.startswith("ops/cli/bench/") and node.col_offset > 0)
    ]
    assert needed == []


def test_without_the_benchmarks_their_command_says_in_one_line_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("ops.bench")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ops.bench", None)
    result = CliRunner().invoke(cli, ["bench", "scheduler"], prog_name="fairgate")
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert "git clone" in line
    assert "pip install -e" in line
