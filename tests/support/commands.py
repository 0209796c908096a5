"""The command line, called in this process."""

from __future__ import annotations

from collections.abc import Mapping

from click.testing import CliRunner, Result

from ops.cli.main import cli


def fairgate(*arguments: str, env: Mapping[str, str] | None = None) -> Result:
    """What `fairgate` answers to these words."""
    return CliRunner().invoke(cli, list(arguments), prog_name="fairgate", env=env)
