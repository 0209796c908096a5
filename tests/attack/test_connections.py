"""Clients without a key that send without end, say nothing, say it slowly, or come in crowds."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPResponse, RemoteDisconnected
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.support.server_process import MODEL, Server, server_process, until

pytestmark = pytest.mark.attack

OPEN_FILES = 256
IDLE_S = 3
HEAD_S = 1
ARGUMENTS = ["--gateway-head-timeout", str(HEAD_S), "--gateway-idle-timeout", str(IDLE_S)]
HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    """A server with few open files, whose limits of time are short. All of 127.0.0.0/8 are its clients."""
    data_dir = tmp_path_factory.mktemp("connections")
    with server_process(data_dir, chat_model, *ARGUMENTS, open_files=OPEN_FILES) as running:
        yield running


def connect(server: Server, source: str = HOST) -> socket.socket:
    """A connection from one of this machine's addresses."""
    port = urlsplit(server.url).port
    assert port is not None
    return socket.create_connection((HOST, port), timeout=20, source_address=(source, 0))


def answer_of(connection: socket.socket) -> tuple[int, str]:
    """Status and error code."""
    response = HTTPResponse(connection)
    response.begin()
    return response.status, json.loads(response.read())["error"]["code"]


def is_ended(connection: socket.socket) -> bool:
    """Whether the server has closed it; nothing is expected on it."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def ask(server: Server, key: str, source: str) -> int:
    """Status of one completion, on a connection from there."""
    transport = httpx.HTTPTransport(local_address=source)
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
    with httpx.Client(transport=transport, headers={"authorization": f"Bearer {key}"}, timeout=20) as client:
        return client.post(f"{server.url}/v1/completions", json=body).status_code


def resident_bytes(server: Server) -> int:
    assert server.process is not None
    found: int = psutil.Process(server.process.pid).memory_info().rss
    return found


def test_40_mib_of_headers_are_refused_and_kept_by_nobody(small_server: Server) -> None:
    before = resident_bytes(small_server)
    for line in (b"x: " + b"y" * 65_536 + b"\r\n", b"y" * 65_536):  # many of them, and one without an end
        with connect(small_server) as connection:
            with suppress(ConnectionError):
                connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\nlong: ")
                for _ in range(640):
                    connection.sendall(line)
            assert answer_of(connection) == (431, "head_too_large")
    assert resident_bytes(small_server) - before < 16 * 2**20
    with connect(small_server) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 200 + b"\r\n")
        assert answer_of(connection) == (431, "head_too_large")


def test_a_head_that_comes_drop_by_drop_is_ended_in_time(small_server: Server) -> None:
    with connect(small_server) as connection:
        began_s = time.monotonic()
        with suppress(ConnectionError):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n")
            while time.monotonic() - began_s < HEAD_S / 2:
                connection.sendall(b"x: y\r\n")
                time.sleep(0.1)  # the attack itself: a drop now and then
        assert answer_of(connection) == (408, "request_timeout")
        assert time.monotonic() - began_s < HEAD_S + 5, "each drop must not begin it anew"


def test_silent_connections_are_closed_whether_new_or_kept_alive(small_server: Server) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(small_server)) for _ in range(20)]
        for each in silent[:5]:
            each.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            response = HTTPResponse(each)
            response.begin()
            assert response.read() == b'{"status":"ok"}'
        assert not any(map(is_ended, silent))
        until(lambda: all(map(is_ended, silent)), deadline_s=IDLE_S + 10)


def metric(server: Server, name: str) -> float:
    """Value of one series; 0 where it is not there yet."""
    with server.http() as client:
        lines = client.get("/metrics").text.split("\n")
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)


def test_400_silent_connections_do_not_end_the_service_with_256_open_files(small_server: Server) -> None:
    key = small_server.tenant("through-a-crowd")
    displaced = 'fairgate_connections_closed_total{cause="displaced"}'
    # On a slow machine some of the crowd have had their time for a head before others come.
    ends = (displaced, 'fairgate_refusals_total{code="request_timeout"}')
    before = [metric(small_server, each) for each in ends]
    with ExitStack() as stack:
        kept = stack.enter_context(small_server.http(key))
        assert kept.get("/v1/models").status_code == 200
        for crowd in range(2):
            for number in range(400):
                connection = stack.enter_context(connect(small_server, f"127.0.{crowd}.{2 + number % 8}"))
                with suppress(ConnectionError):
                    connection.sendall(b"GET / HT")  # half of a head
            assert ask(small_server, key, "127.0.0.100") == 200
        assert kept.get("/v1/models").status_code == 200
        assert kept.get("/readyz").status_code == 200
        assert metric(small_server, "fairgate_connections") < OPEN_FILES
        after = [metric(small_server, each) for each in ends]
        assert after[0] > before[0], "all places were taken"
        assert sum(after) - sum(before) > 400, "they lost their places"


def test_one_address_cannot_have_all_connections(small_server: Server) -> None:
    with ExitStack() as stack:
        crowd = [stack.enter_context(connect(small_server, "127.0.0.30")) for _ in range(150)]
        key = small_server.tenant("beside-a-crowd")
        assert ask(small_server, key, "127.0.0.31") == 200
        answers = set()
        for each in crowd:
            with suppress(RemoteDisconnected):  # it was taken, and rested for too long
                answers.add(answer_of(each))
        assert answers == {(429, "address_has_too_many")}
