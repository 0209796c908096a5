"""Fixtures of databases and of a running server."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Registers them."""
    config.pluginmanager.import_plugin("tests.support.database_fixtures")
    config.pluginmanager.import_plugin("tests.support.server_fixtures")
