"""A server whose engine is one step ahead gives the answers, and charges the tokens, of one that is not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_process import MODEL, Server, until

ASKED: list[dict[str, Any]] = [
    {"max_tokens": 24, "temperature": 0.0},
    {"max_tokens": 24, "temperature": 1.0, "seed": 3},
    {"max_tokens": 1, "temperature": 1.0, "seed": 4},
    {"max_tokens": 40, "temperature": 1.0, "seed": 5, "n": 3},
    {"max_tokens": 30, "temperature": 0.9, "top_p": 0.9, "seed": 7, "ignore_eos": True},
    {"max_tokens": 30, "temperature": 0.9, "frequency_penalty": 0.5, "seed": 8, "ignore_eos": True},
    {"max_tokens": 12, "temperature": 0.7, "seed": 9, "logprobs": 2, "ignore_eos": True},
]


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("ahead"), chat_model, ["--engine-steps-ahead", "1"])
    server.start()
    try:
        yield server
    finally:
        server.stop()


def answers(server: Server, tenant: str, all_asked: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """All at once, so that they share their steps."""
    key = server.tenant(tenant)

    def answer(asked: dict[str, Any]) -> tuple[Any, ...]:
        with server.http(key) as client:
            got = client.post("/v1/completions", json={"model": MODEL, "prompt": "count"} | asked)
        assert got.status_code == 200, got.text
        body = got.json()
        choices = [(choice["text"], choice["finish_reason"]) for choice in body["choices"]]
        logprobs = [choice["logprobs"] and choice["logprobs"]["tokens"] for choice in body["choices"]]
        return choices, logprobs, body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]

    with ThreadPoolExecutor(len(all_asked)) as pool:
        return list(pool.map(answer, all_asked))


def test_answers_and_tokens_are_those_of_the_plain_order(server: Server, ahead: Server) -> None:
    plain = answers(server, "ahead", ASKED)
    assert answers(ahead, "ahead", ASKED) == plain
    # A stop string that comes in the middle of each: the step after it is computed in vain.
    stopped = [
        asked | {"stop": [text[len(text) // 2 :][:3]]}
        for asked, ([(text, _), *_], *_) in zip(ASKED, plain, strict=True)
        if len(text) > 8
    ]
    expected = answers(server, "ahead-stopped", stopped)
    assert answers(ahead, "ahead-stopped", stopped) == expected
    assert [finish for [(_, finish), *_], *_ in expected].count("stop") >= 4
    until(ahead.is_idle)
    assert ahead.verify()["ok"]


def test_a_budget_holds_to_the_token(ahead: Server) -> None:
    key = ahead.tenant("ahead-last")
    ahead.limit("ahead-last", "output_tokens", 61, window="lifetime")
    with ahead.http(key) as client:
        messages = [{"role": "user", "content": "go on"}]
        body = {"model": MODEL, "messages": messages, "temperature": 0.0, "ignore_eos": True}
        got = client.post("/v1/chat/completions", json=body).json()
    assert got["usage"]["completion_tokens"] == 61
    until(ahead.is_idle)
    state = ahead.limit_state("ahead-last", "output_tokens")
    assert (state["used"], state["held"]) == (61, 0)
    assert ahead.verify()["ok"]
