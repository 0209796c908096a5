"""Server programs of the benchmarks: waited for, named with their last words, ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ops.bench.common.errors import CannotBench
from ops.bench.common.processes import server_program
from ops.bench.versus.vllm_server import VllmOptions, vllm_server
from ops.sandbox.free_port import free_port

SERVER = """#!{python}
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""


async def test_a_program_that_answers_is_served_and_ended(tmp_path: Path) -> None:
    """A stand-in for vLLM, where its environment has the program."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(SERVER.format(python=sys.executable))
    program.chmod(0o755)
    async with vllm_server(tmp_path, tmp_path / "run", VllmOptions(16)) as server:
        assert server.process.returncode is None
    assert server.process.returncode is not None


async def test_a_program_that_ends_is_named_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no room for the model')"]
    url = f"http://127.0.0.1:{free_port()}/"
    with pytest.raises(CannotBench, match=r"(?s)peer does not serve after 10 s: .*no room for the model"):
        async with server_program("peer", command, tmp_path / "log", os.environ, url, start_s=10.0):
            pass
