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


def events_of(answer: httpx.Response) -> list[Any]:
    """Of a stream; each has the name of its type."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(events: list[Any]) -> Any:
    """The message, put together as the SDK does."""
    message = events[0]["message"]
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    block["input"] = (block["input"] or "") + delta["partial_json"]
                else:
                    block["text"] += delta["text"]
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"], "fairgate": event["fairgate"]}
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"] or "{}")
    return message


def test_our_own_engine_says_the_same_whole_and_streamed(server: Server, own_key: str) -> None:
    asked = {"model": OWN_MODEL, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    asked |= {"system": "Be short.", "messages": [{"role": "user", "content": "hello"}]}
    whole = post(server, own_key, asked).json()
    events = events_of(post(server, own_key, asked | {"stream": True}))
    assert [event["type"] for event in events if event["type"] != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    streamed = joined(events)
    assert (streamed["content"], streamed["stop_reason"]) == (whole["content"], whole["stop_reason"])
    assert whole["stop_reason"] == "max_tokens"
    counted = {name: value for name, value in asked.items() if name in ("model", "system", "messages")}
    prompt = post(server, own_key, counted, "/v1/messages/count_tokens").json()["input_tokens"]
    for message in (whole, streamed):
        usage = message["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt
        assert usage["output_tokens"] == message["fairgate"]["actual"]["output_tokens"] == 6


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_stop_sequence_that_ended_it_is_named(server: Server, own_key: str, is_stream: bool) -> None:
    asked = {"model": OWN_MODEL, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "messages": ASKED}
    text = post(server, own_key, asked).json()["content"][0]["text"]
    stop = text[4:6]
    answer = post(server, own_key, asked | {"stop_sequences": ["never said", stop], "stream": is_stream})
    message = joined(events_of(answer)) if is_stream else answer.json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"][0]["text"] == text[: text.index(stop)]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_loop_of_tools_ends_with_an_answer(gateway: Server, ruled_key: str, is_stream: bool) -> None:
    """The search that only Anthropic runs is left out with a note."""
    messages = list(ASKED)
    for turn in range(2):
        asked = {"model": MODEL, "max_tokens": 100, "tools": TOOLS, "messages": messages, "stream": is_stream}
        answer = post(gateway, ruled_key, asked)
        message = joined(events_of(answer)) if is_stream else answer.json()
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
    ("path", "body", "status", "error_type", "param"),
    [
        ("/v1/messages", {"messages": ASKED}, 400, "invalid_request_error", "max_tokens"),
        ("/v1/messages", {"messages": ASKED, "max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ("/v1/messages", {"messages": ASKED, "max_tokens": 9, "model": "x"}, 404, "not_found_error", "model"),
        ("/v1/messages/nothing", {}, 404, "not_found_error", None),
    ],
)
def test_refusals_have_anthropics_shape(
    server: Server, own_key: str, path: str, body: Any, status: int, error_type: str, param: str | None
) -> None:
    answer = post(server, own_key, {"model": OWN_MODEL} | body, path)
    said = answer.json()
    assert (answer.status_code, said["type"], said["error"]["type"]) == (status, "error", error_type)
    assert (said["error"]["param"], said["request_id"]) == (param, answer.headers["x-request-id"])


def test_a_wrong_key_is_an_authentication_error(server: Server) -> None:
    answer = post(server, "fg_live_x_y", {"model": OWN_MODEL, "max_tokens": 1, "messages": ASKED})
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")


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
