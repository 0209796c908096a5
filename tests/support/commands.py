"""Commands of `fairgate` beside a server, run in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from ops.cli.main import cli
from tests.support.server_process import Server


def fairgate(where: Server | Path, *arguments: str) -> Result:
    """Runs a command on a server's data directory, or on another one."""
    data_dir = where.data_dir if isinstance(where, Server) else where
    return CliRunner().invoke(cli, [*arguments, "--data-dir", str(data_dir)], prog_name="fairgate")


def answer_of(where: Server | Path, *arguments: str) -> Any:
    """What it says as JSON; it must succeed."""
    result = fairgate(where, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
