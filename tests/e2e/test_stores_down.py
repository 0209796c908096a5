"""The database or Redis goes away under a running server, and comes back.

Fail closed, say so, lose nothing: private servers that these tests kill.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from psycopg.rows import dict_row

from tests.e2e.test_crash import Stream, start_streams
from tests.support import services
from tests.support.server_process import MODEL, Server, server_process, until

BODY = {"model": MODEL, "prompt": "x", "max_tokens": 4, "ignore_eos": True}


@contextmanager
def stopped_at_the_end(service: services.Service) -> Iterator[services.Service]:
    try:
        yield service
    finally:
        service.stop()


@pytest.fixture(scope="module")
def postgres() -> Iterator[services.Service]:
    with stopped_at_the_end(services.start_postgres()) as service:
        yield service


@pytest.fixture(scope="module")
def redis() -> Iterator[services.Service]:
    with stopped_at_the_end(services.start_redis()) as service:
        yield service


@pytest.fixture(scope="module")
def grown_up(
    tmp_path_factory: pytest.TempPathFactory,
    chat_model: Path,
    postgres: services.Service,
    redis: services.Service,
) -> Iterator[Server]:
    """A server on PostgreSQL and Redis."""
    arguments = ["--database-url", postgres.url, "--redis-url", redis.url]
    with server_process(tmp_path_factory.mktemp("grown-up"), chat_model, *arguments) as running:
        yield running


def checks(server: Server) -> tuple[int, dict[str, str]]:
    answer = httpx.get(f"{server.url}/readyz", timeout=30)
    found: dict[str, str] = answer.json()["checks"]
    return answer.status_code, found


def refused(server: Server, key: str, code: str) -> None:
    with server.http(key) as client:
        answer = client.post("/v1/completions", json=BODY)
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["code"] == code
    assert float(answer.headers["retry-after"]) > 0
    for word in ("psycopg", "sqlalchemy", "redis.exceptions", "Traceback", "127.0.0.1"):
        assert word not in answer.text


def served(server: Server, key: str) -> bool:
    with server.http(key) as client:
        return client.post("/v1/completions", json=BODY).status_code == 200


def rows_of(service: services.Service, request_id: str) -> list[dict[str, Any]]:
    with psycopg.connect(service.url, row_factory=dict_row) as connection:
        query = "SELECT * FROM ledger WHERE request_id = %s ORDER BY id"
        return connection.execute(query, [request_id]).fetchall()


def finish(stream: Stream) -> None:
    stream.join(60)
    assert not stream.is_alive()


def test_redis_gone_and_back_empty_keeps_every_limit(grown_up: Server, redis: services.Service) -> None:
    amount = 40
    key = grown_up.tenant("kept")
    limit_id = grown_up.limit("kept", "output_tokens", amount, window="lifetime")
    for _ in range(5):
        assert served(grown_up, key)
    # One request goes on through all of it, and holds its part of a budget of its own.
    other = grown_up.tenant("through")
    grown_up.limit("through", "output_tokens", 4000, window="lifetime")
    (stream,) = start_streams(grown_up, other, 1, max_tokens=3000)
    assert stream.has_tokens.wait(60)
    redis.kill()
    refused(grown_up, key, "quota_store_unavailable")
    status, found = checks(grown_up)
    assert status == 503
    assert found["quota_store"] != "ok"
    assert found["database"] == "ok"
    redis.start()  # it kept nothing: without the ledger, the budget would be whole again
    until(lambda: checks(grown_up)[0] == 200)
    state = grown_up.limit_state("kept", "output_tokens")
    assert (state["id"], state["used"], state["held"]) == (limit_id, 20, 0)
    through = grown_up.limit_state("through", "output_tokens")
    assert through["used"] + through["held"] == 3000, "what runs is held again (or has ended meanwhile)"
    answers = [served(grown_up, key) for _ in range(8)]
    assert answers == [True] * 5 + [False] * 3
    finish(stream)
    assert stream.saw_done
    until(grown_up.is_idle)
    assert grown_up.limit_state("through", "output_tokens")["used"] == 3000
    assert grown_up.verify()["ok"]


def test_the_database_gone_refuses_and_settles_once_when_it_is_back(
    grown_up: Server, postgres: services.Service
) -> None:
    key = grown_up.tenant("durable")
    grown_up.limit("durable", "output_tokens", 100_000, window="lifetime")
    assert served(grown_up, key)
    (stream,) = start_streams(grown_up, key, 1, max_tokens=400)
    assert stream.has_tokens.wait(60)
    postgres.kill()
    # The stream ends while its account cannot be written: the client is told, and not that all is well.
    finish(stream)
    assert not stream.saw_done
    assert stream.error is not None
    assert stream.error["code"] == "settlement_pending"
    refused(grown_up, key, "database_unavailable")
    status, found = checks(grown_up)
    assert status == 503
    assert found["database"] != "ok"
    assert found["quota_store"] == "ok"
    postgres.start()
    until(lambda: served(grown_up, key), deadline_s=40)
    until(grown_up.is_idle, deadline_s=40)
    rows = rows_of(postgres, stream.request_id)
    assert [row["kind"] for row in rows] == ["reserve", "settle"]
    assert rows[1]["output_tokens"] == 400
    assert rows[1]["outcome"] == "completed"
    report = grown_up.verify()
    assert report["ok"], report
    assert report["open_requests"] == 0, "what was refused meanwhile left nothing open"
