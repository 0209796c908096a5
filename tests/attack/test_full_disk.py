"""A server whose disk is full says so until it can write again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from migrations import runner
from tests.support.server_process import MODEL, running, until
from tests.support.small_disk import NAMESPACES, ServerOnSmallDisk, can_mount

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
        full = "cannot be written: no space is left on its disk (ENOSPC)"
        until(lambda: database_check(server) == (503, full))
        for refused in (
            client.post("/v1/completions", json=BODY),
            httpx.post(
                f"{server.url}/admin/v1/tenants",
                json={"name": "one-more"},
                headers={"authorization": f"Bearer {server.owner_key}"},
            ),
        ):
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (503, "database_unavailable")
            assert full in error["message"]
        free()
        until(lambda: database_check(server) == (200, "ok"))
        assert client.post("/v1/completions", json=BODY).status_code == 200
    until(server.is_idle)
    assert server.verify()["ok"]


def test_a_start_on_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """Room is left for the files that SQLite needs to read, and for no write of the start."""
    made, disk = tmp_path / "fairgate.db", tmp_path / "disk"
    runner.upgrade(f"sqlite:///{made}")
    disk.mkdir()
    script = (
        'mount -t tmpfs -o size=8m none "$0" && cp "$1" "$0" && dd if=/dev/zero of="$0/ballast" bs=4096;'
        ' truncate -s -48K "$0/ballast" && shift && exec "$@"'
    )
    serve = ["serve", "--engine-serve", "no", "--port", "0", "--config", str(tmp_path / "fairgate.toml")]
    serve += ["--data-dir", str(tmp_path / "data"), "--database-url", f"sqlite:///{disk}/fairgate.db"]
    (tmp_path / "fairgate.toml").write_text(
        '[[upstreams]]\nname = "away"\nurl = "http://127.0.0.1:9/v1"\nmodel = "m"\nhealth = "/"\n'
        "context_tokens = 64\n"
    )
    ran = subprocess.run(
        [*NAMESPACES, "sh", "-c", script, str(disk), str(made), sys.executable, "-m", "ops.cli.main", *serve],
        capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("fairgate serve: database sqlite://")
    assert "cannot be written: no space is left on its disk (ENOSPC); its disk needs room" in last
