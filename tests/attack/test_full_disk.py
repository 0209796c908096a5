"""A server whose disk is full says so until it can write again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.server_process import MODEL, running, until
from tests.support.small_disk import ServerOnSmallDisk, can_mount

pytestmark = [
    pytest.mark.attack,
    pytest.mark.skipif(not can_mount(), reason="needs user namespaces (unshare --user --mount)"),
]
BODY = {"model": MODEL, "prompt": "count to ten", "max_tokens": 4}


@pytest.fixture
def server(tmp_path: Path, chat_model: Path) -> Iterator[ServerOnSmallDisk]:
    with running(ServerOnSmallDisk(tmp_path / "data", chat_model, disk=tmp_path / "disk")) as server:
        yield server


def database_check(server: ServerOnSmallDisk) -> tuple[int, str]:
    """The status of `/readyz`, and what it says of the database."""
    answer = httpx.get(f"{server.url}/readyz", timeout=30)
    return answer.status_code, answer.json()["checks"]["database"]


def test_readyz_names_a_full_disk_until_it_can_write_again(server: ServerOnSmallDisk) -> None:
    key = server.tenant("on-a-small-disk")
    until(lambda: database_check(server) == (200, "ok"))
    with server.http(key) as client:
        assert client.post("/v1/completions", json=BODY).status_code == 200
        free = server.fill()
        # Writes of requests, or the gateway's own heartbeat, meet it.
        until(lambda: client.post("/v1/completions", json=BODY).status_code == 503)
        full = (503, "cannot be written: no space is left on its disk (ENOSPC)")
        until(lambda: database_check(server) == full)
        free()
        until(lambda: database_check(server) == (200, "ok"))
        assert client.post("/v1/completions", json=BODY).status_code == 200
    until(server.is_idle)
    assert server.verify()["ok"]
