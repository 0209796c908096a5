"""Requests of Anthropic's Messages as chats, and their refusals. (Served: `tests/e2e/test_messages.py`.)"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import pytest

from gateway import errors
from gateway.config import GatewayConfig
from gateway.domain.call import Call, ServedModel
from gateway.errors import ApiError
from gateway.requests.dialects.message_blocks import BLOCK_TYPES_LEFT_OUT
from gateway.requests.dialects.messages import Messages, read, read_count, refused
from gateway.requests.parse import RequestContext
from gateway.requests.prompt import EstimatedRenderer
from gateway.upstream.capabilities import Capabilities, Capability, ServerOffer
from tenants.types import Tier
from tests.support.builders import principal

CAPABLE = Capabilities(frozenset(Capability), fields=frozenset({"file", "thinking"}), kind="vllm")
SERVER = ServerOffer("vllm-a", CAPABLE, is_up=True)
MODEL = ServedModel("m", 4096, EstimatedRenderer.vocabulary, is_estimated=True, servers=(SERVER,))
CONTEXT = RequestContext("req_1", principal(), MODEL, EstimatedRenderer(), GatewayConfig(), created=1)
ASKED = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
PIXEL = {"type": "base64", "media_type": "image/png", "data": "iVBO"}
PIXEL_URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}
ADD: dict[str, Any] = {"name": "add", "input_schema": {"type": "object"}}
RESULT = {"type": "tool_result", "tool_use_id": "t"}
FIRST = "messages[1].content[0]"
FORM = {"type": "json_schema", "schema": {"type": "object"}}
PASSED_FORM = {
    "type": "json_schema", "json_schema": {"name": "answer", "schema": FORM["schema"], "strict": True}
}  # fmt: skip
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


def parsed(**fields: Any) -> tuple[Call, list[str]]:
    """The call, and what was left out."""
    sent = {name: value for name, value in (ASKED | fields).items() if value is not None}
    asked = read(json.dumps(sent).encode(), 100)
    assert isinstance(asked.dialect, Messages)
    return asked.parse(CONTEXT), [each.param for each in asked.dialect.translation.left_out]


def sent(*messages: Any, **fields: Any) -> Any:
    """What the model's server is sent of messages, given as (role, content)."""
    shown = [{"role": role, "content": content} for role, content in messages]
    return parsed(messages=shown, **fields)[0].wordings[0].messages


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_a_turn_with_a_tool_becomes_the_messages_of_a_chat() -> None:
    """Results come first, as they must follow the calls; their images go to the user's message."""
    called = [
        {"type": "thinking", "thinking": "Add", "signature": "s"},
        {"type": "redacted_thinking", "data": "?"},
        {"type": "thinking", "thinking": "."},
        text("I add."),
        {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 3}, "cache_control": {}},
        {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
    ]
    shown = [text("7"), {"type": "image", "source": PIXEL}]
    results = [
        text("Here."),
        {"type": "tool_result", "tool_use_id": "t1", "content": shown},
        {"type": "tool_result", "tool_use_id": "t2", "content": "no such number", "is_error": True},
    ]
    more = [{"type": "tool_result", "tool_use_id": "t2"}]
    calls = [
        {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}
        for name, arguments in (("t1", '{"a":3}'), ("t2", "{}"))
    ]
    system = [text("Short."), text("Kind.")]
    said = {"content": [text("I add.")], "reasoning_content": "Add.", "tool_calls": calls}
    assert sent(("assistant", called), ("user", results), ("user", more), system=system) == [
        {"role": "system", "content": system},
        {"role": "assistant"} | said,
        {"role": "tool", "content": [text("7")], "tool_call_id": "t1"},
        {"role": "tool", "content": "no such number", "tool_call_id": "t2"},
        {"role": "user", "content": [text("Here."), PIXEL_URL]},
        {"role": "tool", "content": "", "tool_call_id": "t2"},
    ]


@pytest.mark.parametrize(
    ("block", "part"),
    [
        ({"type": "image", "source": PIXEL}, PIXEL_URL),
        ({"type": "image", "source": {"type": "url", "url": "https://a.example.org/b"}},
         {"type": "image_url", "image_url": {"url": "https://a.example.org/b"}}),
        ({"type": "document", "title": "b.pdf", "source": PIXEL | {"media_type": "application/pdf"}},
         {"type": "file", "file": {"file_data": "data:application/pdf;base64,iVBO", "filename": "b.pdf"}}),
        ({"type": "document", "title": "Notes", "source": {"type": "text", "data": "Two."}},
         text("Notes\nTwo.")),
        ({"type": "search_result", "source": "https://a", "title": "A", "content": [text("x"), text("y")]},
         text("A\nhttps://a\nx\ny")),
    ],
)  # fmt: skip
def test_images_documents_and_results_of_a_search_become_parts(block: Any, part: Any) -> None:
    assert sent(("user", [block])) == [{"role": "user", "content": [part]}]


@pytest.mark.parametrize(
    ("fields", "passed"),
    [
        ({"tools": [ADD], "tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tools": [ADD], "tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}},
         {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
        ({"tools": [ADD], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
         {"tool_choice": "auto", "parallel_tool_calls": False}),
        ({"thinking": {"type": "disabled"}}, {"thinking": {"type": "disabled"}}),
        ({"thinking": {"type": "adaptive"}, "context_management": {}, "mcp_servers": []}, {}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"output_config": {"format": FORM}}, {"response_format": PASSED_FORM}),
        ({"output_format": FORM}, {"response_format": PASSED_FORM}),
    ],
)  # fmt: skip
def test_fields_reach_the_server_under_its_own_names(fields: Any, passed: Any) -> None:
    call, left_out = parsed(**fields)
    found = dict(call.wordings[0].fields)
    if tools := found.pop("tools", []):
        assert tools == [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    assert (found, left_out) == (passed, [])


def test_what_only_anthropic_runs_is_left_out_with_a_note() -> None:
    blocks = [{"type": kind, "content": []} for kind in (*BLOCK_TYPES_LEFT_OUT, "web_search_tool_result")]
    shown = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": blocks}]
    thinking = {"type": "enabled", "budget_tokens": 2048}
    call, left_out = parsed(
        messages=shown, tools=[SEARCH, ADD], thinking=thinking, context_management={"edits": [{}]}
    )
    paths = [f"messages[1].content[{position}]" for position in range(len(blocks))]
    assert left_out == [*paths, "tools[0]", "thinking", "context_management"]
    assert len(call.wordings[0].fields["tools"]) == 1


def test_all_sessions_of_claude_code_are_one_end_users() -> None:
    def found(user_id: str) -> tuple[str, str | None]:
        call = parsed(metadata={"user_id": user_id})[0]
        return call.end_user, call.session

    device = "user_" + "a" * 64 + "_account_"
    digest = hashlib.sha256(device.encode()).hexdigest()
    assert [found(f"{device}_session_{name}") for name in "xy"] == [(digest, "x"), (digest, "y")]
    assert found('{"session_id": "x", "device_id": "d"}') == ('{"device_id":"d"}', "x")
    for other in ("ann", "ann_session_2", "", "[1]", "{"):
        assert found(other) == (other, None)
    assert found("user_" + "_account_" * 50_000)[1] is None, "in time that grows with its length"


def test_words_of_both_apis_name_a_tier() -> None:
    tiers = [parsed(service_tier=word)[0].tier for word in ("auto", "standard_only", "priority", "batch")]
    assert tiers == [Tier.STANDARD, Tier.STANDARD, Tier.INTERACTIVE, Tier.BATCH]


def test_a_count_has_the_prompt_of_the_call() -> None:
    fields = {"tools": [ADD], "system": "Be short.", "thinking": {"type": "adaptive"}}
    counted = {name: ASKED[name] for name in ("model", "messages")} | fields
    count = read_count(json.dumps(counted).encode(), 100).parse(CONTEXT)
    assert count.prompts == parsed(**fields)[0].prompts


def one(role: str, *blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}, {"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "param", "way_out"),
    [
        ({"max_tokens": None}, "max_tokens", "send, for example, 1024"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences", "most is 16"),
        ({"container": "c"}, "container", "Leave it out"),
        ({"mcp_servers": [{}]}, "mcp_servers", "Leave it out"),
        ({"thread": {"type": "create"}}, "thread", "Send all messages"),
        ({"nonsense": 1}, "nonsense", "Unknown parameter"),
        ({"output_config": {"format": {"type": "x"}}}, "output_config.format", "json_schema"),
        ({"output_format": {}}, "output_format", "json_schema"),
        ({"output_config": {"effort": "?"}}, "output_config.effort", "one of none, minimal"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role", "user, assistant"),
        (one("user", {"type": "odd"}), f"{FIRST}.type", "'text', 'image', 'document'"),
        (one("user", {"type": "tool_use"}), f"{FIRST}.type", "from the assistant"),
        (one("user", text("a"), {"type": "text"}), "messages[1].content[1].text", "Missing"),
        (one("user", RESULT | {"tool_use_id": None}), f"{FIRST}.tool_use_id", "Missing"),
        (one("user", RESULT | {"tool_use_id": ""}), f"{FIRST}.tool_use_id", "must have 1 to"),
        (one("user", RESULT | {"content": [{"type": "odd"}]}), f"{FIRST}.content[0].type", "'text'"),
        (one("assistant", {"type": "tool_use", "id": "t", "name": "a b"}), f"{FIRST}.name", "1 to 64"),
        (one("user", {"type": "image", "source": PIXEL | {"media_type": "text/html"}}),
         f"{FIRST}.source.data", "data:image/"),
        (one("user", {"type": "document", "source": {"type": "file"}}), f"{FIRST}.source", "type 'base64'"),
        ({"tools": [SEARCH, {}]}, "tools[1].name", "1 to 64 letters"),
        ({"tools": [SEARCH, ADD, ADD]}, "tools[2].name", "rename it"),
        ({"tools": [SEARCH, ADD | {"input_schema": [1]}]}, "tools[1].input_schema", "a JSON schema"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice", "only functions"),
        ({"tools": [SEARCH, ADD], "tool_choice": {"type": "tool", "name": "web_search"}},
         "tool_choice", "only functions"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type", "'any'"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field_and_the_way_out(fields: Any, param: str, way_out: str) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert way_out in caught.value.message


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.bad_request("m"), "invalid_request_error"),
        (errors.insufficient_quota("m"), "rate_limit_error"),
        (errors.engine_unavailable(), "overloaded_error"),
        (ApiError(413, "c", "m"), "request_too_large"),
        (ApiError(403, "c", "m"), "permission_error"),
        (ApiError(502, "c", "m"), "api_error"),
    ],
)
def test_an_error_has_anthropics_type_on_its_paths_and_openais_elsewhere(error: ApiError, kind: str) -> None:
    found = msgspec.json.decode(refused(error, "req_1", "/v1/messages/count_tokens"))
    assert (found["type"], found["error"]["type"], found["request_id"]) == ("error", kind, "req_1")
    assert (found["error"]["code"], found["error"]["message"]) == (error.code, error.message)
    assert refused(error, "req_1", "/v1/messagesx") == error.body()
