"""Requests of the Responses API as chat completions."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import GatewayConfig
from gateway.domain.call import Call, ServedModel
from gateway.errors import ApiError
from gateway.requests.dialects.response_items import InputItem, InputPart
from gateway.requests.dialects.responses import ResponsesRequest, read
from gateway.requests.dialects.translation import MOST_NOTES, Translation
from gateway.requests.parse import RequestContext
from gateway.requests.prompt import EstimatedRenderer
from gateway.upstream.capabilities import Capabilities, Capability, ServerOffer
from tests.support.builders import principal

ABLE = ServerOffer("a", Capabilities(frozenset(Capability), frozenset({"file"}), kind="vllm"), is_up=True)
MODEL = ServedModel("m", 4096, EstimatedRenderer.vocabulary, is_estimated=True, servers=(ABLE,))
CONTEXT = RequestContext("req_1", principal(), MODEL, EstimatedRenderer(), GatewayConfig(), created=1)
FUNCTION: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": None}
ADD: Any = {"type": "function", "function": {"name": "add"}}
CALL: Any = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "{}"}
OUTPUT: Any = {"type": "function_call_output", "call_id": "c1", "output": "3"}
THOUGHT: Any = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x",
                "content": [{"type": "reasoning_text", "text": "Hm."}]}  # fmt: skip
SAID: Any = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
    {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}]}  # fmt: skip
IMAGE: Any = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}


def translation(**fields: Any) -> Translation:
    body = json.dumps({"model": "m", "input": "hello"} | fields).encode()
    dialect: Any = read(body, 2048).dialect
    found: Translation = dialect.translation
    return found


def call(**fields: Any) -> Call:
    return translation(**fields).parse(CONTEXT)


def called(*ids: str) -> Any:
    return [{"id": each, "type": "function", "function": {"name": "add", "arguments": "{}"}} for each in ids]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([{"role": "developer", "content": "Be kind."}, {"role": "user", "content": [
            {"type": "input_text", "text": "What?"}, IMAGE | {"detail": "low"},
            {"type": "input_file", "file_data": "data:text/plain;base64,aGk=", "filename": "a.txt"}]}],
         [{"role": "system", "content": "Be kind."}, {"role": "user", "content": [
             {"type": "text", "text": "What?"},
             {"type": "image_url", "image_url": {"url": IMAGE["image_url"], "detail": "low"}},
             {"type": "file", "file": {"file_data": "data:text/plain;base64,aGk=", "filename": "a.txt"}}]}]),
        ([THOUGHT, SAID, CALL, CALL | {"call_id": "c2"}, OUTPUT],
         [{"role": "assistant", "content": "Hi", "reasoning_content": "Hm.",
           "tool_calls": called("c1", "c2")}, {"role": "tool", "content": "3", "tool_call_id": "c1"}]),
        ([SAID, CALL, THOUGHT, CALL | {"call_id": "c2"}, SAID, OUTPUT],  # outputs follow their calls
         [{"role": "assistant", "content": "Hi\nHi", "reasoning_content": "Hm.",
           "tool_calls": called("c1", "c2")}, {"role": "tool", "content": "3", "tool_call_id": "c1"}]),
        ([SAID, THOUGHT, SAID, {"type": "web_search_call", "id": "ws_1", "status": "completed"}],
         [{"role": "assistant", "content": "Hi"},
          {"role": "assistant", "content": "Hi", "reasoning_content": "Hm."}]),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "S."}]}, CALL],
         [{"role": "assistant", "content": None, "reasoning_content": "S.", "tool_calls": called("c1")}]),
        ([{"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "+a"},
          OUTPUT | {"type": "custom_tool_call_output", "output": [{"type": "input_text", "text": "ok"}]}],
         [{"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function",
           "function": {"name": "patch", "arguments": '{"input":"+a"}'}}]},
          {"role": "tool", "content": "ok", "tool_call_id": "c1"}]),
    ],
    ids=["parts", "one turn", "calls in turns", "two turns", "summary", "custom"],
)  # fmt: skip
def test_items_are_messages(items: list[Any], expected: Any) -> None:
    assert call(input=items).wordings[0].messages == expected
    said = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    assert call(instructions="Be kind.").wordings[0].messages == said


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"tools": [{"type": "web_search"}, FUNCTION]}, "tools",
         [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "add"}}, "tool_choice", ADD),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [
            {"type": "function", "name": "add"}, {"type": "web_search"}]}}, "tool_choice",
         {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [ADD]}}),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "web_search"}]}}, "tool_choice", "none"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "description": None}}},
         "response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning_effort", "low"),
    ],
)  # fmt: skip
def test_fields_reach_the_server_as_a_chats(fields: Any, name: str, value: Any) -> None:
    assert call(**fields).wordings[0].fields[name] == value


def test_log_probabilities_are_asked_for_by_include() -> None:
    asked = call(include=["message.output_text.logprobs", "reasoning.encrypted_content"], top_logprobs=2)
    assert (asked.sampling.logprobs, call().sampling.logprobs) == (2, None)


def test_what_is_left_out_is_noted_once_for_each_kind_and_within_a_bound() -> None:
    hosted = {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "", "outcome": {}}]}
    found = translation(
        input=[hosted, hosted, SAID], truncation="auto", tool_choice="auto",
        tools=[{"type": "custom", "name": "patch"}, FUNCTION, {"type": "namespace", "tools": []}],
    )  # fmt: skip
    assert [note.param for note in found.left_out] == ["input[0]", "tools[0]", "tools[2]", "truncation"]
    assert "'custom'" in found.left_out[1].why
    many = translation(tools=[{"type": f"t{number}"} for number in range(999)]).left_out
    assert len(many) == MOST_NOTES


@pytest.mark.parametrize(
    ("fields", "param", "way_out"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "the conversation so far in 'input'"),
        ({"prompt": {"id": "p"}}, "prompt", "its text in 'instructions' or 'input'"),
        ({"background": True}, "background", "'stream': true"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "'store': false"),
        ({"input": [SAID, {"type": "tool_dance"}]}, "input[1].type", "'function_call_output'"),
        ({"input": [{"role": "tool", "content": "3"}]}, "input[0].role", "'function_call_output'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
         "input[0].content[0].file_id", "in 'input[0].content[0].image_url'"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type",
         "'input_image'"),
        ({"input": [{"role": "user", "content": [IMAGE, IMAGE | {"detail": "huge"}]}]},
         "input[0].content[1].detail", "low"),
        ({"input": [CALL | {"call_id": None}]}, "input[0].call_id", "Missing"),
        ({"input": []}, "input", "at least one"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name", "Leave one of them out"),
        ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].name", "1 to 64 letters"),
        ({"tools": [{"name": "add"}]}, "tools[0].type", "'function'"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "Send 'auto'"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice", "Send 'auto'"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "of them"),
        ({"tools": [FUNCTION], "tool_choice": "any"}, "tool_choice", "auto, none, required"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
         "tool_choice", "functions of 'tools'"),
        ({"top_logprobs": 99}, "top_logprobs", "20"),
        ({"truncation": "middle"}, "truncation", "'auto' or 'disabled'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "minimum of 1"),
        ({"max_output_tokens": 9999}, "max_output_tokens", "4096"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "1 to 64"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"reasoning": {"effort": "hard"}}, "reasoning.effort", "one of none"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "Unknown"),
        ({"n": 2}, "n", "Unknown"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field_and_the_way_out(fields: Any, param: str, way_out: str) -> None:
    with pytest.raises(ApiError) as refused:
        call(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert way_out in refused.value.message


IN_ITEMS = InputItem.__struct_fields__ + InputPart.__struct_fields__
CONTENT = st.lists(st.sampled_from([
    {"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "no"}, IMAGE,
    IMAGE | {"image_url": "ftp://x"}, IMAGE | {"detail": "huge"}, {"type": "input_file", "file_data": "?"},
]), max_size=3)  # fmt: skip
ITEMS = st.one_of(
    st.sampled_from([THOUGHT, SAID, CALL, CALL | {"name": "a b"}, CALL | {"call_id": ""}, OUTPUT,
                     OUTPUT | {"call_id": "c" * 5000}, {"role": "user"}, {"type": "web_search_call"}]),
    st.builds(lambda role, content: {"role": role, "content": content},
              st.sampled_from(["user", "assistant", "system"]), CONTENT),
)  # fmt: skip
TOOLS = st.lists(st.sampled_from([FUNCTION, {"type": "web_search"}, {"type": "function", "name": "a b"},
                                  FUNCTION | {"name": "b", "parameters": 3}]), max_size=2)  # fmt: skip


@given(items=st.lists(ITEMS, min_size=1, max_size=5), tools=TOOLS, instructions=st.sampled_from([None, "x"]))
@settings(deadline=None, max_examples=150)
def test_every_refusal_names_a_field_of_the_request(
    items: list[Any], tools: list[Any], instructions: str | None
) -> None:
    """Also where the chat that it became is refused, by places that the client has never seen."""
    try:
        call(input=items, tools=tools, instructions=instructions)
    except ApiError as error:
        param = error.param or ""
    else:
        return
    first, *rest = re.split(r"[.\[]", param)
    assert first in msgspec.structs.asdict(ResponsesRequest(model="", input=""))
    listed, known = {"input": (items, IN_ITEMS), "tools": (tools, FUNCTION)}.get(first, ([], ()))
    if rest and listed:
        assert int(rest[0].rstrip("]")) < len(listed)
        assert {name for name in rest[1:] if not name.endswith("]")} <= {*known}, param
