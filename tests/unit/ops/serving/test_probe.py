"""Tests of `fairgate doctor --probe`: the server's own answer decides, and nothing heavy is imported."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from ops.cli.main import cli
from ops.serving import datadir
from ops.serving.processes.probe import readiness


@contextmanager
def server_that_says(status: int) -> Iterator[str]:
    class Readiness(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 404)
            self.end_headers()
            self.wfile.write(b'{"engine": "starting"}')

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Readiness)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_probe_ends_as_the_running_server_says(tmp_path: Path, status: int, code: int) -> None:
    datadir.ensure(tmp_path)
    with server_that_says(status) as url, datadir.serve_lock(tmp_path):
        datadir.write_server_file(tmp_path, datadir.ServerFile(url, 1, "token"))
        result = CliRunner().invoke(cli, ["doctor", "--probe", "--data-dir", str(tmp_path)])
    assert result.exit_code == code, result.output
    assert ("starting" in result.output) == (status == 503)


def test_a_directory_without_a_server_is_not_ready_even_if_one_left_its_file(tmp_path: Path) -> None:
    datadir.ensure(tmp_path)
    with server_that_says(200) as url:
        datadir.write_server_file(tmp_path, datadir.ServerFile(url, 1, "token"))
        assert readiness(tmp_path) == f"no server runs on {tmp_path}"


def test_a_server_that_does_not_answer_is_not_ready(tmp_path: Path) -> None:
    datadir.ensure(tmp_path)
    with server_that_says(200) as url:
        pass
    with datadir.serve_lock(tmp_path):
        datadir.write_server_file(tmp_path, datadir.ServerFile(url, 1, "token"))
        assert f"{url} does not answer" in readiness(tmp_path)


def test_the_probe_imports_neither_the_gateway_nor_a_database() -> None:
    code = (
        "import sys, ops.cli.run.doctor, ops.serving.processes.probe;"
        "print([name for name in ('gateway.app', 'sqlalchemy', 'httpx', 'torch') if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"
