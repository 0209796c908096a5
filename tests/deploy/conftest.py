"""Fixtures of databases."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Registers them."""
    config.pluginmanager.import_plugin("tests.support.database_fixtures")
