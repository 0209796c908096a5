"""Configuration commands against a server that answers something else, or nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ops.cli.main import cli

PLAN = {"object": "config.plan", "revision": 1, "etag": "e", "steps": [], "unnamed": []}


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """The URL of a server that answers like this; status 0: it has a plan without steps, then hangs up."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            is_plan = status == 0 and self.path.endswith("/plan")
            if status == 0 and not is_plan:
                return
            answer = json.dumps(PLAN).encode() if is_plan else body
            self.send_response(200 if is_plan else status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Keeps quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def config(command: str, url: str, folder: Path) -> Result:
    path, key_file = folder / "fairgate.yaml", folder / "key"
    path.write_text("version: 1\n")
    key_file.write_text("fg_live_nothing")
    arguments = [command, "-f", str(path), "--url", url, "--key-file", str(key_file)]
    return CliRunner().invoke(cli, arguments, prog_name="fairgate")


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b'{"detail": "Not Found"}'), (500, b'{"error": "bad"}'), (500, b'"text"'), (200, b"[1]"),
        (200, b'{"object": "list"}'),
    ],
)  # fmt: skip
def test_a_server_that_is_none_of_ours_is_named(status: int, body: bytes, tmp_path: Path) -> None:
    with answering(status, body) as url:
        refused = config("diff", url, tmp_path)
    assert refused.exit_code == 2
    assert f"{url} answered {status}, and not as a Fairgate server does" in refused.output


def test_an_apply_without_an_answer_may_have_been_done(tmp_path: Path) -> None:
    with answering(0, b"") as url:
        lost = config("apply", url, tmp_path)
    assert (lost.exit_code, "look with `fairgate diff`" in lost.output) == (1, True), lost.output
    gone = config("apply", url, tmp_path)
    assert "does not answer" in gone.output
    assert "fairgate diff" not in gone.output, "nothing was sent"
