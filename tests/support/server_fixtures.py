"""Pytest plugin: servers that tests share, their model, and a browser in front of it.

The `conftest.py` of a folder whose tests use them registers it; others need not import what it imports.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support import rule_server, services
from tests.support.chromium import chromium as chromium
from tests.support.chromium import visitor as visitor
from tests.support.server_process import PRICE, ROOT, Server, save_chat_model, server_process, until

MODEL_DIR = ROOT / "ops" / "demo" / "model"


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


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One with the model that ships with Fairgate, which knows tools. Shared, as `server`."""
    arguments = ("--engine-max-sequences", "8")
    with server_process(tmp_path_factory.mktemp("shipped"), MODEL_DIR, *arguments) as running:
        yield running


@pytest.fixture(scope="session")
def two_workers(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    """One with two workers, on a PostgreSQL and a Redis of its own. Shared; a test that kills a worker waits
    for the next."""
    with ExitStack() as closing:
        postgres, redis = services.start_postgres(), services.start_redis()
        closing.callback(postgres.stop)
        closing.callback(redis.stop)
        arguments = ["--workers", "2", "--database-url", postgres.url, "--redis-url", redis.url]
        arguments += ["--engine-max-sequences", "16", "--gateway-max-connections-per-address", "100"]
        data_dir = tmp_path_factory.mktemp("workers")
        yield closing.enter_context(server_process(data_dir, chat_model, *arguments))


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    """One in front of the server that answers by rule, which it has tried itself. Shared, as `server`."""
    with rule_server.rule_server() as peer:
        upstream = {
            "name": "rules",
            "url": f"{peer.url}/v1",
            "model": rule_server.MODEL,
            "tokenizer_dir": str(chat_model),
            "server": "vllm",
            "fields": ["file"],
        }
        arguments = ["--engine-serve", "no", "--upstreams", json.dumps([upstream])]
        arguments += ["--prices", f"{PRICE},{rule_server.MODEL}=100/300/50"]
        with server_process(tmp_path_factory.mktemp("gateway"), chat_model, *arguments) as running:
            until(lambda: "tools" in json.dumps(running.status()["models"]))
            yield running
