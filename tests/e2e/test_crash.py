"""Charges when gateway or engine are killed in the middle of streams.

Every request has exactly one settlement, and delivered <= charged <= emitted by the engine.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_process import MODEL, Server, server_process, until


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    """Killed again and again, with a tenant of its own for each test."""
    data_dir = tmp_path_factory.mktemp("crashing")
    with server_process(data_dir, chat_model, "--engine-max-sequences", "8") as running:
        yield running


class Stream(threading.Thread):
    """Reads one stream in a thread, and keeps what was delivered up to its end or its death."""

    def __init__(self, server: Server, key: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._key = key
        self._max_tokens = max_tokens
        self.request_id = ""
        self.delivered = 0
        """Tokens that the client saw: each has its log probability."""
        self.error: dict[str, Any] | None = None
        self.saw_done = False
        self.comments = 0
        self.status = 0
        self.has_tokens = threading.Event()

    def run(self) -> None:
        body = {
            "model": MODEL, "prompt": "once upon a time", "max_tokens": self._max_tokens, "stream": True,
            "ignore_eos": True, "logprobs": 0,
        }  # fmt: skip
        try:
            with (
                self._server.http(self._key) as client,
                client.stream("POST", "/v1/completions", json=body) as response,
            ):
                self.status = response.status_code
                self.request_id = response.headers["x-request-id"]
                for line in response.iter_lines():
                    self._take(line)
        except (httpx.HTTPError, json.JSONDecodeError):
            pass  # the server was killed, perhaps in the middle of a line: that is the test
        self.has_tokens.set()

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.saw_done = True
        elif line.startswith(":"):
            self.comments += 1
        elif line.startswith("data: "):
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                self.error = chunk["error"]
                return
            logprobs = chunk["choices"][0]["logprobs"] if chunk["choices"] else None
            self.delivered += len(logprobs["tokens"]) if logprobs else 0
            if self.delivered >= 3:
                self.has_tokens.set()


def ledger(server: Server) -> list[dict[str, Any]]:
    """Every row, straight from the database."""
    with closing(sqlite3.connect(server.data_dir / "fairgate.db", timeout=30)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute("SELECT * FROM ledger ORDER BY id")]


def settlements(server: Server, request_id: str) -> list[dict[str, Any]]:
    return [row for row in ledger(server) if row["request_id"] == request_id and row["kind"] == "settle"]


def held_output(server: Server, request_id: str) -> int:
    rows = [row for row in ledger(server) if row["request_id"] == request_id]
    return sum(row["output_tokens"] for row in rows if row["kind"] in ("reserve", "top_up"))


def start_streams(server: Server, key: str, count: int, max_tokens: int = 6000) -> list[Stream]:
    streams = [Stream(server, key, max_tokens) for _ in range(count)]
    for stream in streams:
        stream.start()
    return streams


def let_end(server: Server, tenant: str) -> None:
    """Lets the slow streams of the tenant's keys end at once."""
    for shown in server.admin("GET", f"/limits?tenant={tenant}")["data"]:
        if shown["kind"] == "key":
            server.limit(tenant, "output_tokens", 1_000_000, rate_per_s=1_000_000, key=shown["subject_id"])


def emitted_by_tenant(server: Server) -> dict[str, int]:
    """Tokens that the engine says it emitted, since it started."""
    service = server.status()["engines"][0]["service"]
    return {tenant_id: had[1] for tenant_id, had in service.items()}


def test_a_killed_gateway_settles_every_stream_once_when_it_is_back(crashing: Server) -> None:
    key = crashing.tenant("survivor")
    crashing.limit("survivor", "output_tokens", 1_000_000, window="lifetime")
    tenant_id = crashing.admin("GET", "/tenants/survivor")["id"]
    # More streams than the engine runs at once: some are decoding, some wait in the queue.
    streams = start_streams(crashing, key, 6)
    for stream in streams:
        assert stream.has_tokens.wait(60)
    engine_pid = crashing.engine().pid
    crashing.kill()
    for stream in streams:
        stream.join(30)
        assert stream.delivered >= 3
        assert not stream.saw_done

    crashing.start()
    assert crashing.status()["recovery"]["recovered"] == 6
    assert crashing.engine().pid == engine_pid, "the engine outlives its gateway, and is adopted"
    until(crashing.is_idle)
    charged = 0
    for stream in streams:
        rows = settlements(crashing, stream.request_id)
        assert len(rows) == 1, "exactly one settlement"
        assert rows[0]["outcome"] == "recovered"
        assert stream.delivered <= rows[0]["output_tokens"] < 6000
        charged += rows[0]["output_tokens"]
    assert charged == emitted_by_tenant(crashing)[tenant_id], "charged is what the engine emitted"
    assert crashing.limit_state("survivor", "output_tokens")["used"] == charged
    assert crashing.verify()["ok"]
    # A second restart finds nothing to do.
    crashing.kill()
    crashing.start()
    assert crashing.status()["recovery"]["open_reserves"] == 0
    assert [len(settlements(crashing, stream.request_id)) for stream in streams] == [1] * 6
    assert crashing.limit_state("survivor", "output_tokens")["used"] == charged


def test_gateway_and_engine_killed_together_bill_what_was_reported_and_count_what_was_held(
    crashing: Server,
) -> None:
    key = crashing.tenant("unlucky")
    crashing.limit("unlucky", "total_tokens", 1_000_000, window="lifetime")
    (stream,) = start_streams(crashing, key, 1)
    assert stream.has_tokens.wait(60)
    engine = crashing.engine()
    engine.kill()
    crashing.kill()
    engine.wait(10)
    stream.join(30)
    crashing.start()
    rows = settlements(crashing, stream.request_id)
    # The gateway may have had the time to settle it, as an engine lost, before it was killed itself.
    assert len(rows) == 1
    state = crashing.limit_state("unlucky", "total_tokens")
    if rows[0]["outcome"] == "lost":
        assert rows[0]["counted_output"] == held_output(crashing, stream.request_id) >= stream.delivered
        assert state["used"] == rows[0]["counted_input"] + rows[0]["counted_output"]
    else:
        assert rows[0]["outcome"] == "engine_lost"
    assert state["held"] == 0
    assert crashing.verify()["ok"]


def test_streams_outlive_their_engine_and_are_charged_once(crashing: Server) -> None:
    key = crashing.tenant("steady")
    crashing.limit("steady", "output_tokens", 1_000_000, window="lifetime")
    streams = start_streams(crashing, key, 3, max_tokens=400)
    for stream in streams:
        assert stream.has_tokens.wait(60)
    engine = crashing.engine()
    engine.kill()
    # While it is away: refused, not hung.
    with crashing.http(key) as client:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
        answer = client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_unavailable"
            assert float(answer.headers["retry-after"]) > 0
    for stream in streams:
        stream.join(60)
        assert stream.saw_done, stream.error
        (row,) = settlements(crashing, stream.request_id)
        assert row["outcome"] == "completed"
        assert row["output_tokens"] == stream.delivered == 400
    assert crashing.engine().pid != engine.pid, "the supervisor started another"
    until(crashing.is_idle)
    state = crashing.limit_state("steady", "output_tokens")
    assert state["held"] == 0
    assert 1_200 <= state["used"] <= 1_202, "the streams, and the short answer if it had one"
    assert crashing.verify()["ok"]


def test_a_stream_is_kept_alive_while_the_engine_stalls_and_then_goes_on(crashing: Server) -> None:
    key = crashing.tenant("patient")
    (stream,) = start_streams(crashing, key, 1, max_tokens=1500)
    assert stream.has_tokens.wait(60)
    engine = crashing.engine()
    engine.suspend()
    try:
        until(lambda: stream.comments, deadline_s=15)
    finally:
        engine.resume()
    stream.join(60)
    assert stream.saw_done
    until(crashing.is_idle)
    (row,) = settlements(crashing, stream.request_id)
    assert stream.delivered == row["output_tokens"] == 1500
    assert crashing.verify()["ok"]


def test_requests_that_wait_when_the_gateway_is_killed_are_settled_at_nothing(crashing: Server) -> None:
    key = crashing.tenant("waiting")
    crashing.limit("waiting", "total_tokens", 1_000_000, window="lifetime")
    tenant_id = crashing.admin("GET", "/tenants/waiting")["id"]
    streams = start_streams(crashing, key, 20)
    # More than are asked for below: a few may have their turn between the look at the queue and the kill.
    until(lambda: sum(crashing.status()["queued"].values()) >= 10)
    crashing.kill()
    for stream in streams:
        stream.join(30)
    crashing.start()
    mine = [row for row in ledger(crashing) if row["tenant_id"] == tenant_id]
    rows = {row["request_id"]: row for row in mine if row["kind"] == "settle"}
    reserves = [row["request_id"] for row in mine if row["kind"] == "reserve"]
    assert len(rows) == len([row for row in mine if row["kind"] == "settle"]), "one settlement each"
    assert set(rows) == set(reserves)
    assert len(rows) == 20
    lost = [row for row in rows.values() if row["outcome"] == "lost"]
    assert len(lost) >= 6, "what waited was never dispatched"
    assert all(row["output_tokens"] == row["input_tokens"] == row["requests"] == 0 for row in lost)
    for stream in streams:
        if stream.request_id:
            assert rows[stream.request_id]["output_tokens"] >= stream.delivered
    assert crashing.limit_state("waiting", "total_tokens")["held"] == 0
    assert crashing.verify()["ok"]
