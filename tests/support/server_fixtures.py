"""Pytest plugin: a server that tests share, its model, and a browser in front of it.

The `conftest.py` of a folder whose tests use them registers it; others need not import what it imports.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chromium import chromium as chromium
from tests.support.chromium import visitor as visitor
from tests.support.server_process import Server, save_chat_model, server_process


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory that serves both kinds of completion."""
    return save_chat_model(tmp_path_factory.mktemp("chat-model"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    """A server that is shared: each test makes tenants of its own."""
    data_dir = tmp_path_factory.mktemp("server")
    flags = ["--engine-max-sequences", "8", "--gateway-alert-every", "1", "--gateway-webhook-private", "yes"]
    with server_process(data_dir, chat_model, *flags) as running:
        yield running
