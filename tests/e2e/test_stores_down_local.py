"""Service while Redis hangs, with a local slice of each limit.

A private Redis that is stopped (SIGSTOP: it hangs, connections stay open) and goes on with all its memory.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_crash import start_streams
from tests.e2e.test_stores_down import BODY, checks, finish, served, stopped_at_the_end
from tests.support import services
from tests.support.server_process import Server, server_process, until

AMOUNT = 200
SLICE = 40
EACH = 4
"""Output tokens of one request."""


@pytest.fixture(scope="module")
def redis() -> Iterator[services.Service]:
    with stopped_at_the_end(services.start_redis()) as service:
        yield service


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, chat_model: Path, redis: services.Service
) -> Iterator[Server]:
    arguments = ["--redis-url", redis.url, "--gateway-store-failure", "local", "--gateway-local-slice", "20"]
    with server_process(tmp_path_factory.mktemp("local"), chat_model, *arguments) as running:
        yield running


def is_local(server: Server) -> bool:
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    return "\nfairgate_quota_store_local 1.0\n" in text


def test_a_slice_is_served_while_redis_hangs_and_counted_when_it_goes_on(
    server: Server, redis: services.Service
) -> None:
    key, unseen, spent = server.tenant("sliced"), server.tenant("unseen"), server.tenant("spent")
    for name, amount in (("sliced", AMOUNT), ("unseen", AMOUNT), ("spent", EACH)):
        server.limit(name, "output_tokens", amount, window="lifetime")
    assert served(server, key)
    assert served(server, spent)
    # It goes on through all of it: what it was promised before needs no slice.
    through = server.tenant("through")
    server.limit("through", "output_tokens", 4000, window="lifetime")
    (stream,) = start_streams(server, through, 1, max_tokens=3000)
    assert stream.has_tokens.wait(60)
    assert not is_local(server)
    assert redis.process is not None
    os.kill(redis.process.pid, signal.SIGSTOP)
    try:
        answers = [served(server, key) for _ in range(SLICE // EACH + 5)]
        assert answers == [True] * (SLICE // EACH) + [False] * 5
        assert is_local(server)
        status, found = checks(server)
        assert status == 200
        assert found["quota_store"].startswith("local")
        with server.http(key) as client:
            refused = client.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "quota_store_unavailable")
        assert float(refused.headers["retry-after"]) > 0
        assert not served(server, unseen)
        assert not served(server, spent)
    finally:
        os.kill(redis.process.pid, signal.SIGCONT)
    until(lambda: not is_local(server) and checks(server)[1]["quota_store"] == "ok")
    state = server.limit_state("sliced", "output_tokens")
    assert (state["used"], state["held"]) == (EACH + SLICE, 0)
    held = server.limit_state("through", "output_tokens")
    assert held["used"] + held["held"] == 3000, "what runs is held again (or has ended meanwhile)"
    left = (AMOUNT - SLICE - EACH) // EACH
    assert [served(server, key) for _ in range(left + 1)] == [True] * left + [False]
    finish(stream)
    assert stream.saw_done
    until(server.is_idle)
    assert server.limit_state("sliced", "output_tokens")["used"] == AMOUNT
    assert server.limit_state("through", "output_tokens")["used"] == 3000
    report = server.verify()
    assert report["ok"], report
