"""Commands of `fairgate`, run in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from click.testing import CliRunner, Result

from ops.cli.main import cli

if TYPE_CHECKING:
    from tests.support.server_process import Server


def run_command(*arguments: str, env: Mapping[str, str] | None = None) -> Result:
    """Runs a command with exactly these arguments."""
    return CliRunner().invoke(cli, list(arguments), prog_name="fairgate", env=env)


def fairgate(where: Server | Path, *arguments: str) -> Result:
    """Runs a command on a server's data directory, or on another one."""
    data_dir = getattr(where, "data_dir", where)
    return run_command(*arguments, "--data-dir", str(data_dir))


def answer_of(where: Server | Path, *arguments: str) -> Any:
    """What it says as JSON; it must succeed."""
    result = fairgate(where, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
