"""One key, one run, one charge: with the real SDK, through lost clients and a killed gateway."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.e2e.test_crash import ledger
from tests.support.server_process import MODEL, Server, server_process, until

HELLO: Any = [{"role": "user", "content": "Hello"}]
LONG: Any = {"ignore_eos": True}


@pytest.fixture(scope="module")
def key(server: Server) -> str:
    return server.tenant("once")


@pytest.fixture
def client(server: Server, key: str) -> Iterator[OpenAI]:
    with OpenAI(api_key=key, base_url=f"{server.url}/v1", max_retries=0, timeout=60) as made:
        yield made


def settled(server: Server, tenant: str) -> list[dict[str, Any]]:
    tenant_id = server.admin("GET", f"/tenants/{tenant}")["id"]
    return [row for row in ledger(server) if row["tenant_id"] == tenant_id and row["kind"] == "settle"]


def test_a_repeat_gets_the_stored_answer_and_is_not_charged(server: Server, client: OpenAI) -> None:
    def ask(text: str, idempotency_key: str) -> Any:
        return client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=[{"role": "user", "content": text}],
            max_tokens=5,
            temperature=1.0,
            extra_body=LONG,
            extra_headers={"Idempotency-Key": idempotency_key},
        )

    before = len(settled(server, "once"))
    first, again = ask("Hello", "a"), ask("Hello", "a")
    assert first.content == again.content
    assert "x-fairgate-idempotent-replay" not in first.headers
    assert again.headers["x-fairgate-idempotent-replay"] == "true"
    assert len(settled(server, "once")) == before + 1
    other = ask("Hello", "b")
    assert other.parse().id != first.parse().id
    assert len(settled(server, "once")) == before + 2
    with pytest.raises(openai.ConflictError) as refused:
        ask("Goodbye", "a")
    assert refused.value.code == "idempotency_key_reused"
    assert refused.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.BadRequestError, match="1 to 255 printable ASCII") as too_long:
        ask("Hello", "k" * 10_000)
    assert too_long.value.param == "Idempotency-Key"
    assert len(settled(server, "once")) == before + 2


def test_a_replayed_stream_is_the_same_event_for_event(server: Server, key: str) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 6, "stream": True, **LONG}
    headers = {"Idempotency-Key": "stream"}
    with server.http(key) as client:
        first = client.post("/v1/chat/completions", json=body, headers=headers)
        again = client.post("/v1/chat/completions", json=body, headers=headers)
    assert first.text.endswith("data: [DONE]\n\n")
    assert again.text == first.text
    assert again.headers["content-type"] == first.headers["content-type"]
    assert again.headers["x-fairgate-idempotent-replay"] == "true"
    assert again.headers["x-request-id"] != first.headers["x-request-id"]


def test_two_at_once_run_once(server: Server, key: str) -> None:
    before = len(settled(server, "once"))
    body = {"model": MODEL, "prompt": "at once", "max_tokens": 200, **LONG}
    found: list[httpx.Response] = []

    def ask() -> None:
        with server.http(key) as client:
            found.append(client.post("/v1/completions", json=body, headers={"Idempotency-Key": "twins"}))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answer.status_code for answer in found] == [200] * 4
    assert len({answer.text for answer in found}) == 1
    assert len(settled(server, "once")) == before + 1


def test_a_run_goes_on_when_its_client_leaves_and_the_retry_gets_all_of_it(server: Server, key: str) -> None:
    before = len(settled(server, "once"))
    body = {"model": MODEL, "prompt": "left", "max_tokens": 400, "stream": True, **LONG}
    headers = {"Idempotency-Key": "left"}
    with (
        server.http(key) as client,
        client.stream("POST", "/v1/completions", json=body, headers=headers) as response,
    ):
        next(response.iter_lines())
    with server.http(key) as client:
        again = client.post("/v1/completions", json=body, headers=headers)
    assert again.headers["x-fairgate-idempotent-replay"] == "true"
    assert again.text.endswith("data: [DONE]\n\n")
    rows = settled(server, "once")
    assert len(rows) == before + 1
    assert (rows[-1]["outcome"], rows[-1]["output_tokens"]) == ("completed", 400)


def test_what_was_refused_before_it_ran_may_be_tried_again(server: Server) -> None:
    key = server.tenant("poor")
    server.limit("poor", "output_tokens", 3, window="lifetime")
    body = {"model": MODEL, "prompt": "x", "max_tokens": 10, **LONG}
    with server.http(key) as client:
        refused = client.post("/v1/completions", json=body, headers={"Idempotency-Key": "r"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
        server.limit("poor", "output_tokens", 1000, window="lifetime")
        until(lambda: server.limit_state("poor", "output_tokens")["available"] == 1000)
        again = client.post("/v1/completions", json=body, headers={"Idempotency-Key": "r"})
    assert again.status_code == 200, again.text
    assert "x-fairgate-idempotent-replay" not in again.headers


def test_a_killed_gateway_takes_the_answer_and_not_the_charge(tmp_path: Path, chat_model: Path) -> None:
    body = {"model": MODEL, "prompt": "killed", "max_tokens": 6000, "stream": True, **LONG}
    headers = {"Idempotency-Key": "killed"}
    with server_process(tmp_path, chat_model) as server:
        key = server.tenant("cut")
        with server.http(key) as client, pytest.raises(httpx.HTTPError):
            _cut_off(server, client, body, headers)
        server.start()
        until(server.is_idle)
        with server.http(key) as client:
            again = client.post("/v1/completions", json=body, headers=headers)
        assert again.status_code == 409
        assert again.json()["error"]["code"] == "idempotent_run_lost"
        assert again.headers["x-should-retry"] == "false"
        (row,) = settled(server, "cut")
        charged = row["input_tokens"] + row["output_tokens"]
        assert 0 < row["output_tokens"] < 6000
        assert f"{charged} tokens were charged" in again.json()["error"]["message"]


def _cut_off(server: Server, client: httpx.Client, body: Any, headers: dict[str, str]) -> None:
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        lines = response.iter_lines()
        next(lines)
        server.kill()
        for _ in lines:
            pass
