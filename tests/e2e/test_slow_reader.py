"""A stream whose client reads nothing, on a real socket.

The kernel's buffers fill, then the server's, then the bounded ones of the request, and the engine rests.
After `gateway.slow_reader` seconds the request is cut, and every record says so; a client that reads again
before that misses nothing.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.test_crash import emitted_by_tenant, ledger
from tests.support.server_process import MODEL, Server, server_process, until

SLOW_READER_S = 12
"""Time enough for a busy machine to show that the engine rests before the request is cut."""
PATIENT_S = 600
"""Longer than this test may take: here no stream is cut, however long the way to that sight."""
MOST_EVENTS = 8
CHOICES = 3
MOST_TOKENS = 7_500
"""With the log probabilities of twenty tokens beside each some 12 megabytes: more than any buffer takes."""
LATE_TOKENS = 5_000
RECEIVE_BUFFER_BYTES = 4_096
READING_BUFFER_BYTES = 1 << 20
"""Of a client that reads at last: through the small one megabytes take minutes of late acknowledgements."""


ARGUMENTS = ["--engine-max-sequences", "4", "--gateway-max-buffered-events", str(MOST_EVENTS)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    arguments = [*ARGUMENTS, "--gateway-slow-reader", str(SLOW_READER_S)]
    with server_process(tmp_path_factory.mktemp("slow-reader"), chat_model, *arguments) as running:
        yield running


@pytest.fixture
def patient_server(tmp_path: Path, chat_model: Path) -> Iterator[Server]:
    arguments = [*ARGUMENTS, "--gateway-slow-reader", str(PATIENT_S)]
    with server_process(tmp_path / "patient", chat_model, *arguments) as running:
        yield running


@contextmanager
def unread_stream(server: Server, key: str, **fields: Any) -> Iterator[socket.socket]:
    """A streamed completion that was asked for and is not read."""
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": "on and on"}], "stream": True,
        "max_tokens": MOST_TOKENS, "ignore_eos": True, "logprobs": True, "top_logprobs": 20,
    } | fields  # fmt: skip
    payload = json.dumps(body).encode()
    address = urlsplit(server.url)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address.netloc}\r\nconnection: close\r\n"
    head += f"authorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(payload)}\r\n\r\n"
    with socket.socket() as connection:
        connection.settimeout(60)
        # Before it connects: the window that it offers is made of this.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        connection.connect((address.hostname, address.port))
        connection.sendall(head.encode() + payload)
        yield connection


def chunks_of(connection: socket.socket) -> list[dict[str, Any]]:
    """Everything that was written to it, up to its end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READING_BUFFER_BYTES)
    answer = HTTPResponse(connection)
    answer.begin()
    assert answer.status == 200
    lines = answer.read().decode().split("\n")  # a token may hold what Python calls a line's end
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


class Others:
    """Another tenant that uses the same engine."""

    def __init__(self, server: Server, name: str) -> None:
        self._server = server
        self._key = server.tenant(name)
        self._tenant_id: str = server.admin("GET", f"/tenants/{name}")["id"]

    def see_resting(self, tenant_id: str) -> bool:
        """Whether the engine emitted nothing for `tenant_id` while it served this tenant."""
        before = emitted_by_tenant(self._server)
        with self._server.http(self._key) as client:
            body = {"model": MODEL, "prompt": "x", "max_tokens": 40, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200
        served = before.get(self._tenant_id, 0) + 40
        until(lambda: emitted_by_tenant(self._server).get(self._tenant_id, 0) >= served)
        now = emitted_by_tenant(self._server)
        return 0 < now.get(tenant_id, 0) == before.get(tenant_id)


def settled(server: Server, tenant_id: str) -> list[dict[str, Any]]:
    return [row for row in ledger(server) if row["tenant_id"] == tenant_id and row["kind"] == "settle"]


def test_a_client_that_reads_nothing_is_cut_and_pays_what_the_engine_emitted(server: Server) -> None:
    others = Others(server, "others")
    key = server.tenant("unread")
    server.limit("unread", "total_tokens", 10_000_000, window="lifetime")
    tenant_id = server.admin("GET", "/tenants/unread")["id"]
    input_tokens = len("<user>on and on\n<assistant>")

    with unread_stream(server, key, n=CHOICES, max_tokens=MOST_TOKENS // CHOICES) as connection:
        until(lambda: others.see_resting(tenant_id), deadline_s=60)
        rested = emitted_by_tenant(server)[tenant_id]
        assert settled(server, tenant_id) == [], "it still waits for its reader, and others go on"
        until(lambda: settled(server, tenant_id))
        chunks = chunks_of(connection)
    until(server.is_idle)

    [row] = settled(server, tenant_id)
    detail = row["detail"] if isinstance(row["detail"], dict) else json.loads(row["detail"])
    assert row["outcome"] == "slow_reader"
    # The kernel may have taken a few more pieces since it was seen to rest.
    assert rested <= row["output_tokens"] == emitted_by_tenant(server)[tenant_id] < MOST_TOKENS
    assert (detail["basis"], detail["engine_counted"]) == ("engine", CHOICES)
    # The bound, and that it was come to. (Each choice's last piece may come when another takes the place.)
    assert MOST_EVENTS <= detail["most_buffered_events"] < MOST_EVENTS + CHOICES
    last = chunks[-1]
    assert last["error"]["code"] == "slow_reader"
    account = last["fairgate"]
    assert account["request_id"] == row["request_id"]
    assert account["outcome"] == "slow_reader"
    assert account["actual"]["output_tokens"] == row["output_tokens"]
    delivered = sum(
        len(choice["logprobs"]["content"])
        for chunk in chunks[:-1]
        for choice in chunk["choices"]
        if choice["logprobs"]
    )
    assert 0 < delivered <= row["output_tokens"]
    with server.http() as client:
        counted = 'fairgate_requests_total{outcome="slow_reader",tier="standard"}'
        assert counted in client.get("/metrics").text
    state = server.limit_state("unread", "total_tokens")
    assert (state["used"], state["held"]) == (input_tokens + row["output_tokens"], 0)
    report = server.verify()
    assert report["ok"], report


def test_a_client_that_reads_again_in_time_gets_everything(patient_server: Server) -> None:
    key, others = patient_server.tenant("late"), Others(patient_server, "others-late")
    tenant_id = patient_server.admin("GET", "/tenants/late")["id"]
    with unread_stream(
        patient_server, key, max_tokens=LATE_TOKENS, stream_options={"include_usage": True}
    ) as connection:
        until(lambda: others.see_resting(tenant_id), deadline_s=60)
        assert emitted_by_tenant(patient_server)[tenant_id] < LATE_TOKENS
        chunks = chunks_of(connection)
    last = chunks[-1]
    assert (last["fairgate"]["outcome"], last["usage"]["completion_tokens"]) == ("completed", LATE_TOKENS)
