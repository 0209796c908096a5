"""Fixtures of databases, of a running server, and of a table."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ops.cli.main import cli


def pytest_configure(config: pytest.Config) -> None:
    """Registers them."""
    config.pluginmanager.import_plugin("tests.support.database_fixtures")
    config.pluginmanager.import_plugin("tests.support.server_fixtures")


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small batch-or-wait table, as `fairgate policy solve` makes it: batches of two at most."""
    path = tmp_path_factory.mktemp("table") / "table.json"
    arguments = ["--rates", "1,4", "--max-batch", "2", "--slo-s", "0.2", "--wait-buckets", "4"]
    solved = CliRunner().invoke(cli, ["policy", "solve", *arguments, "--out", str(path)])
    assert solved.exit_code == 0, solved.output
    return path
