"""Anthropic's Messages on a running server: text on our own engine, tools by rule; what SDKs read of both."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.rule_server import MODEL
from tests.support.server_process import MODEL as OWN_MODEL
from tests.support.server_process import Server

TOOLS: Any = [
    {
        "name": "add",
        "input_schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
        },
    },
    {"type": "web_search_20250305", "name": "web_search"},
]
ASKED: Any = [{"role": "user", "content": "Call add with 3 and 'three'."}]


@pytest.fixture(scope="module")
def ruled_key(gateway: Server) -> str:
    return gateway.tenant("messages")


@pytest.fixture(scope="module")
def own_key(server: Server) -> str:
    return server.tenant("messages")


def post(server: Server, key: str, body: Any, path: str = "/v1/messages") -> httpx.Response:
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        return client.post(path, json=body)


def message_of(answer: httpx.Response) -> Any:
    """Of a stream put together as the SDK does."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()
    first, *rest = (json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: "))
    message = first["message"]
    for event in rest:
        match event:
            case {"content_block": block}:
                message["content"].append(block | ({"input": ""} if "input" in block else {}))
            case {"index": index, "delta": {"type": _, **said}}:
                block, ((name, text),) = message["content"][index], said.items()
                block["input" if name == "partial_json" else name] += text
            case {"delta": ending}:
                message |= ending | {"usage": event["usage"], "fairgate": event["fairgate"]}
    for block in message["content"]:
        if "input" in block:
            block["input"] = json.loads(block["input"] or "{}")
    return message


def test_our_own_engine_says_the_same_whole_and_streamed(server: Server, own_key: str) -> None:
    """And which stop sequence ended it."""
    prompt = {"model": OWN_MODEL, "system": "Be short.", "messages": [{"role": "user", "content": "hello"}]}
    asked = prompt | {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    asked |= {"thinking": {"type": "disabled"}, "cache_control": {}}
    whole, streamed = (
        message_of(post(server, own_key, asked | {"stream": is_stream})) for is_stream in (False, True)
    )
    assert (streamed["content"], streamed["stop_reason"]) == (whole["content"], "max_tokens")
    counted = post(server, own_key, prompt, "/v1/messages/count_tokens").json()["input_tokens"]
    text = whole["content"][0]["text"]
    stop = text[4:6]
    for is_stream, message in enumerate((whole, streamed)):
        usage = message["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
        assert usage["output_tokens"] == message["fairgate"]["actual"]["output_tokens"] == 12
        stopping = {"stop_sequences": ["never said", stop], "stream": bool(is_stream)}
        stopped = message_of(post(server, own_key, asked | stopping))
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
        assert stopped["content"][0]["text"] == text[: text.index(stop)]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_loop_of_tools_ends_with_an_answer(gateway: Server, ruled_key: str, is_stream: bool) -> None:
    """The search that only Anthropic runs is left out with a note."""
    messages = list(ASKED)
    for turn in range(2):
        asked = {"model": MODEL, "max_tokens": 100, "tools": TOOLS, "messages": messages, "stream": is_stream}
        message = message_of(post(gateway, ruled_key, asked))
        assert [each["param"] for each in message["fairgate"]["left_out"]] == ["tools[1]"]
        messages.append({"role": "assistant", "content": message["content"]})
        if turn == 0:
            assert message["stop_reason"] == "tool_use"
            (call,) = message["content"]
            assert (call["name"], call["input"]) == ("add", {"a": 3, "note": "three"})
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": "seven"}
            messages.append({"role": "user", "content": [result]})
    assert (message["stop_reason"], message["content"][0]["text"]) == ("end_turn", "It says: seven")


@pytest.mark.parametrize(
    ("path", "fields", "status", "error_type", "param"),
    [
        ("", {"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ("", {"model": "x"}, 404, "not_found_error", "model"),
        ("/nothing", {}, 404, "not_found_error", None),
        ("", {}, 401, "authentication_error", None),
    ],
)
def test_refusals_have_anthropics_shape(
    server: Server, own_key: str, path: str, fields: Any, status: int, error_type: str, param: str | None
) -> None:
    body = {"model": OWN_MODEL, "messages": ASKED, "max_tokens": 9} | fields
    answer = post(server, "fg_live_x_y" if status == 401 else own_key, body, f"/v1/messages{path}")
    said = answer.json()
    assert (answer.status_code, said["type"], said["error"]["type"]) == (status, "error", error_type)
    assert (said["error"]["param"], said["request_id"]) == (param, answer.headers["x-request-id"])


def test_a_spent_budget_refuses_a_message_in_anthropics_words_and_counts_on(gateway: Server) -> None:
    """What is longer than 4 KiB is refused before it is read, unless it costs nothing."""
    key = gateway.tenant("messages-spent")
    gateway.limit("messages-spent", "total_tokens", 10, window="day")
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "long " * 1000}]}
    refused = post(gateway, key, asked | {"max_tokens": 1})
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert refused.headers["x-should-retry"] == "false"
    counted = post(gateway, key, asked, "/v1/messages/count_tokens")
    assert counted.json()["input_tokens"] > 10
