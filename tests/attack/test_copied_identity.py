"""A copied data directory: two processes never serve under one gateway's id."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_crash import settlements, start_streams
from tests.support.server_process import MODEL, PRICE, ROOT, Server, server_process, until

pytestmark = pytest.mark.attack

STALE_S = 3
BUDGET = 8_000
TOKENS_PER_S = 250
"""Of the engine at most, so that a request still runs when a copy has started, on a slow machine, too."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    """Killed by its tests, and ended by the last one."""
    flags = ["--gateway-stale", str(STALE_S), "--engine-max-sequences", "4"]
    flags += ["--engine-max-tokens-per-s", str(TOKENS_PER_S)]
    with server_process(tmp_path_factory.mktemp("gateways") / "original", chat_model, *flags) as running:
        yield running


def copy_of(original: Server, name: str) -> Server:
    """A copy of its data directory on the same database."""
    data_dir = original.data_dir.with_name(name)
    left_out = shutil.ignore_patterns("engine-*", "run", "logs", "serve.lock", "fairgate.db*", "stderr")
    shutil.copytree(original.data_dir, data_dir, ignore=left_out)
    database = f"sqlite:///{original.data_dir / 'fairgate.db'}"
    return Server(data_dir, original.model_dir, [*original.arguments, "--database-url", database])


def start_and_see(server: Server) -> tuple[bool, str]:
    """Whether it serves, and what it said on stderr if not."""
    flags = ["--data-dir", str(server.data_dir), "--model", str(server.model_dir), "--model-name", MODEL]
    command = [sys.executable, "-m", "ops.cli.main", "serve", "--json", "--port", "0", *flags]
    command += ["--prices", PRICE, "--engine-threads", "1", *server.arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FAIRGATE_")}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=environment | {"PYTHONPATH": str(ROOT)},
        text=True,
    ) as process:
        assert process.stdout is not None
        serves = bool(process.stdout.readline())
        if serves:
            process.terminate()
        _, said = process.communicate(timeout=60)
        assert serves or process.returncode == 1
    return serves, said


def test_a_copy_of_a_live_gateway_is_refused_and_settles_nothing_of_it(original: Server) -> None:
    key = original.tenant("copied")
    original.limit("copied", "output_tokens", BUDGET, window="lifetime")
    (stream,) = start_streams(original, key, 1, max_tokens=7_000)
    assert stream.has_tokens.wait(60)
    serves, said = start_and_see(copy_of(original, "copy"))
    assert not serves, "two processes serve under one id"
    assert "copy of the same data directory" in said
    assert "delete the file gateway-id" in said, "it names the way out"
    assert stream.error is None
    assert not settlements(original, stream.request_id), "the live request was settled by the copy"


def test_a_restart_after_kill_9_goes_on_without_a_wait(original: Server) -> None:
    gateway_id = (original.data_dir / "gateway-id").read_text()
    original.kill()
    original.start()
    assert (original.data_dir / "gateway-id").read_text() == gateway_id
    assert "is watched" not in original.log(), "its own directory, whose lock it holds: no other process"
    until(original.is_idle)


def test_a_gateway_that_stood_still_stops_when_a_copy_has_taken_its_place(original: Server) -> None:
    process = original.process
    assert process is not None
    copy = copy_of(original, "replacement")
    # It stops between two of its writes: in one of them it would keep SQLite's lock, and the copy would wait.
    with closing(sqlite3.connect(original.data_dir / "fairgate.db", 30, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        process.send_signal(signal.SIGSTOP)
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        database.execute("ROLLBACK")
    try:
        # Its heartbeat stands still: as after the loss of a machine, of which the copy is the replacement.
        copy.start()
        try:
            process.send_signal(signal.SIGCONT)
            assert process.wait(STALE_S * 4) == 1, "both serve under one id"
            assert "copy of the same data directory" in original.log()
            assert copy.process is not None
            assert copy.process.poll() is None
            copy.owner_key = original.owner_key
            assert copy.status()["gateway_id"] == (copy.data_dir / "gateway-id").read_text().strip()
        finally:
            copy.stop()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
