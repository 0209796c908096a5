"""Tokens of texts, and texts of tokens, from a running server: as its requests count them, and uncharged."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.e2e.test_bad_input import refused
from tests.e2e.test_upstreams import settled
from tests.support.server_process import MODEL, Server

TEXT = "Hello, w\u00f6rld. " * 3
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": TEXT}]


def test_a_text_its_tokens_and_the_same_text_again(server: Server, chat_model: Path) -> None:
    key = server.tenant("tokens")
    expected = Tokenizer.from_file(str(chat_model / "tokenizer.json")).encode(TEXT)
    with server.http(key) as client:
        (shown,) = client.get("/v1/models").json()["data"]
        for path in ("/tokenize", "/v1/tokenize"):
            body = {"model": MODEL, "prompt": TEXT, "return_token_strs": True}
            found = client.post(path, json=body).json()
            assert found == {
                "count": len(expected.ids),
                "max_model_len": shown["max_model_len"],
                "tokens": expected.ids,
                "token_strs": expected.tokens,
            }
        for path in ("/detokenize", "/v1/detokenize"):
            assert client.post(path, json={"model": MODEL, "tokens": found["tokens"]}).json() == {
                "prompt": TEXT
            }
        large = client.post("/tokenize", json={"model": MODEL, "prompt": TEXT * 1000}).json()
        assert (large["count"] > 1000 < len(large["tokens"]), large["token_strs"]) == (True, None)
    assert settled(server, "tokens") == []


def test_messages_have_the_tokens_that_a_chat_is_charged_for(server: Server) -> None:
    with server.http(server.tenant("tokens-of-chats")) as client:
        chat = {"model": MODEL, "messages": MESSAGES}
        count = client.post("/tokenize", json=chat | {"add_generation_prompt": True}).json()["count"]
        answer = client.post("/v1/chat/completions", json=chat | {"max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == count


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ],
)
def test_what_has_no_tokens_is_refused_by_its_field(
    server: Server, path: str, fields: dict[str, Any], param: str
) -> None:
    with server.http() as client:
        error = client.post(path, json={"model": MODEL} | fields)
    assert (error.status_code, error.json()["error"]["param"]) == (400, param)


def test_they_are_for_keys_of_their_models_and_not_without_end(server: Server) -> None:
    key = server.tenant("tokens-for-some")
    body = {"model": MODEL, "prompt": "a"}
    with server.http(key) as client, ThreadPoolExecutor(8) as threads:
        refused(client.post("/tokenize", json=body | {"model": "none"}), 404, "model_not_found", "model")
        found = list(threads.map(lambda _: client.post("/tokenize", json=body), range(200)))
        limited = next(each for each in found if each.status_code == 429)
        assert "20 tokenizer answers per second" in refused(limited, 429, "rate_limit_exceeded")
        assert float(limited.headers["retry-after-ms"]) <= 50
        server.admin("POST", "/tenants/tokens-for-some/suspend")
        refused(client.post("/tokenize", json=body), 403, "tenant_suspended")
