"""Schemas and tools on our own engine of a running server: by OpenAI's SDK, and by plain HTTP.

The shipped model says what it likes, so what is asserted is the form: JSON that parses and validates, calls
of the asked tool with arguments of the asked types, and what is said of an answer that was cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import jsonschema_rs
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.support.server_process import MODEL, Server

LONG: Any = {
    "type": "object",
    "properties": {
        **{name: {"type": "string", "maxLength": 400} for name in ("name", "town", "street")},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "minItems": 2},
        "inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    },
    "required": ["name", "town", "street", "tags", "inner"],
}
"""Its shortest end is known at each place; the tiny model's strings are so long that each answer is cut."""
ENDLESS: Any = {"type": "object", "required": ["code"],
                "properties": {"code": {"type": "string", "pattern": "^[a-z]{200,}$"}}}  # fmt: skip
"""Its shortest end is not known."""
ASKED: Any = [{"role": "user", "content": "Ada is 36 years old. Write it as JSON with name and age."}]
CALLING: Any = [{"role": "user", "content": "What is 3 + 4? Use add."}]
ADD: Any = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in ("left", "right")},
        "required": ["left", "right"],
        "additionalProperties": False,
    },
}
TOOL: Any = {"type": "function", "function": ADD}
LEFT_AND_RIGHT = jsonschema_rs.validator_for(ADD["parameters"])


class Person(BaseModel):
    """What the SDK parses an answer into."""

    name: Annotated[str, Field(max_length=8)]
    age: Annotated[int, Field(ge=0, le=150)]


def of_schema(schema: Any) -> Any:
    """The field `response_format` for it."""
    return {"type": "json_schema", "json_schema": {"name": "asked", "schema": schema}}


@pytest.fixture(scope="module")
def key(shipped: Server) -> str:
    return shipped.tenant("structured")


@pytest.fixture(scope="module")
def own_key(server: Server) -> str:
    return server.tenant("structured")


@pytest.fixture(scope="module")
def client(shipped: Server, key: str) -> Iterator[OpenAI]:
    with OpenAI(api_key=key, base_url=f"{shipped.url}/v1", max_retries=0) as made:
        yield made


def post(server: Server, key: str, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
    with server.http(key) as http:
        said = {} if "input" in body else {"messages": ASKED}
        return http.post(path, json={"model": MODEL} | said | body)


def json_and_account(answer: httpx.Response) -> tuple[str, Any]:
    """The text and `fairgate` of a chat, whole or streamed, a response or a message."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        deltas = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
        return "".join(deltas), events[-1]["fairgate"]
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if "choices" in body:
        return body["choices"][0]["message"]["content"], body["fairgate"]
    content = body["content"] if "content" in body else body["output"][0]["content"]
    return content[0]["text"], body["fairgate"]


def test_the_sdk_parses_chats_responses_and_messages(shipped: Server, key: str, client: OpenAI) -> None:
    chat: Any = {"model": MODEL, "messages": ASKED, "response_format": Person, "temperature": 0}
    whole = client.chat.completions.parse(**chat).choices[0]
    with client.chat.completions.stream(**chat) as stream:
        streamed = stream.get_final_completion().choices[0]
    asked: Any = {"model": MODEL, "input": ASKED, "text_format": Person, "temperature": 0}
    response = client.responses.parse(**asked)
    with client.responses.stream(**asked) as events:
        last = events.get_final_response()
    schema = Person.model_json_schema()
    body = {"max_tokens": 100, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    message = post(shipped, key, body | {"temperature": 0}, "/v1/messages").json()
    person = whole.message.parsed
    assert isinstance(person, Person)
    assert (whole.finish_reason, streamed.finish_reason) == ("stop", "stop")
    texts = [Person.model_validate_json(message["content"][0]["text"]), streamed.message.parsed]
    assert [*texts, response.output_parsed, last.output_parsed] == [person] * 4


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_tool_is_called_and_its_result_answered(client: OpenAI, choice: Any, is_stream: bool) -> None:
    asked: Any = {"model": MODEL, "tools": [TOOL], "temperature": 0, "max_tokens": 100}

    def answered(messages: Any, **fields: Any) -> Any:
        if not is_stream:
            return client.chat.completions.create(messages=messages, **asked, **fields).choices[0]
        with client.chat.completions.stream(messages=messages, **asked, **fields) as stream:
            return stream.get_final_completion().choices[0]

    first = answered(CALLING, tool_choice=choice, parallel_tool_calls=False)
    assert first.finish_reason == "tool_calls"
    assert not first.message.content
    (call,) = first.message.tool_calls
    assert call.function.name == "add"
    assert LEFT_AND_RIGHT.is_valid(json.loads(call.function.arguments))
    last = answered([*CALLING, first.message, {"role": "tool", "tool_call_id": call.id, "content": "7"}])
    assert last.message.content or last.message.tool_calls


def test_a_call_has_the_form_of_each_dialect(shipped: Server, key: str, client: OpenAI) -> None:
    tools: Any = [{"type": "function", "strict": True, **ADD}]
    response = client.responses.create(
        model=MODEL, input=CALLING, tools=tools, tool_choice="required", parallel_tool_calls=False,
        temperature=0,
    )  # fmt: skip
    (called,) = response.output
    assert (called.type, response.status) == ("function_call", "completed")
    assert LEFT_AND_RIGHT.is_valid(json.loads(called.arguments))
    body = {"messages": CALLING, "max_tokens": 100, "temperature": 0,
            "tools": [{"name": "add", "input_schema": ADD["parameters"]}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}  # fmt: skip
    message = post(shipped, key, body, "/v1/messages").json()
    (block,) = message["content"]
    assert (block["type"], block["input"], message["stop_reason"]) == (
        "tool_use", json.loads(called.arguments), "tool_use",
    )  # fmt: skip


def test_what_vllm_takes_keeps_to_its_form(client: OpenAI) -> None:
    def said(**fields: Any) -> str:
        answer = client.chat.completions.create(
            model=MODEL, messages=ASKED, max_tokens=60, seed=3, extra_body=fields
        )
        return str(answer.choices[0].message.content)

    assert re.fullmatch("[ab]{3}-[0-9]{2}", said(structured_outputs={"regex": "[ab]{3}-[0-9]{2}"}))
    assert said(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert said(structured_outputs={"grammar": 'root ::= "x" ("y" | "z")'}) in ("xy", "xz")
    assert said(structured_outputs={"grammar": 'start: "x" ("y" | "z")'}) in ("xy", "xz")
    assert json.loads(said(structured_outputs={"json": {"type": "boolean"}})) in (True, False)
    assert said(guided_choice=["red", "blue"]) in ("red", "blue")


def test_a_json_object_is_one_where_it_ends(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASKED, response_format={"type": "json_object"}, temperature=0, max_tokens=200
    )
    if answer.choices[0].finish_reason == "length":
        assert answer.model_extra["fairgate"]["incomplete"] == "json"
    else:
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("how", ["whole", "streamed", "responses", "messages"])
def test_what_max_tokens_cuts_is_closed_and_says_so(
    server: Server, own_key: str, how: str, seed: int
) -> None:
    asked = {"type": "json_schema", "name": "asked", "schema": LONG}
    most = 120 + 7 * seed
    path, body = {
        "whole": ("/v1/chat/completions", {"response_format": of_schema(LONG), "max_tokens": most}),
        "streamed": ("/v1/chat/completions", {"response_format": of_schema(LONG), "max_tokens": most,
                     "stream": True, "stream_options": {"include_usage": True}}),
        "responses": ("/v1/responses", {"input": ASKED, "text": {"format": asked},
                      "max_output_tokens": most}),
        "messages": ("/v1/messages", {"output_config": {"format": asked}, "max_tokens": most}),
    }[how]  # fmt: skip
    text, account = json_and_account(post(server, own_key, body | {"seed": seed}, path))
    assert jsonschema_rs.is_valid(LONG, json.loads(text)), text
    assert account["closed"] is True
    assert not {"incomplete", "stop_cause"} & set(account)
    assert account["actual"]["output_tokens"] <= most


def test_what_a_hard_limit_ends_is_closed_within_it(server: Server) -> None:
    """At each of these amounts, so that it ends at another place."""
    for amount in range(120, 132, 3):
        name = f"closing-{amount}"
        key = server.tenant(name, on_low_budget="truncate")
        server.limit(name, "output_tokens", amount, window="lifetime")
        text, account = json_and_account(post(server, key, {"response_format": of_schema(LONG)}))
        assert jsonschema_rs.is_valid(LONG, json.loads(text)), text
        assert (account["closed"], account["stop_cause"]) == (True, "budget")
        assert (
            account["actual"]["output_tokens"] == server.limit_state(name, "output_tokens")["used"] <= amount
        )
    assert server.verify()["ok"]


def test_what_is_cut_without_a_promise_is_called_incomplete(server: Server, own_key: str) -> None:
    body = {"response_format": of_schema(ENDLESS), "max_tokens": 60}
    answer = post(server, own_key, body)
    text, account = json_and_account(answer)
    assert text.startswith('{"code":"')
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert (account["incomplete"], account.get("closed")) == ("json", None)


REFUSED: dict[str, tuple[Any, str, str]] = {
    "a word as a schema": ({"response_format": of_schema("object")}, "response_format.json_schema", "schema"),
    "an unknown type": ({"response_format": of_schema({"type": "text"})},
        "response_format.json_schema.schema", "text"),
    "too deep": ({"response_format": of_schema(json.loads('{"items":' * 200 + "{}" + "}" * 200))},
        "response_format", "deep"),
    "what the library cannot do": ({"response_format": of_schema({"type": "string", "pattern": "(?=a)b"})},
        "response_format.json_schema.schema", "look-around"),
    "a broken pattern": ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", ""),
    "a broken grammar": ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar", ""),
    "no words": ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ""),
    "two forms": ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs", "response_format"),
    "a tool twice": ({"tools": [TOOL, TOOL]}, "tools[1]", "add"),
    "a tool without a name": ({"tools": [{"type": "function", "function": {"parameters": {}}}]},
        "tools[0].function", "name"),
    "a tool's schema": ({"tools": [{"type": "function", "function": ADD | {"parameters": {"type": "x"}}}],
        "tool_choice": "required"}, "tools[0].function.parameters", "x"),
    "required without tools": ({"tool_choice": "required"}, "tool_choice", "tools"),
    "an unknown tool": ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
        "tool_choice", "not one of 'tools' ('add')"),
}  # fmt: skip
"""By what is wrong: the body, the field that the error names, and a word of its text."""


@pytest.mark.parametrize(("body", "param", "word"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_by_its_place_and_reason(
    shipped: Server, key: str, body: Any, param: str, word: str
) -> None:
    answer = post(shipped, key, {"max_tokens": 8} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert error["param"].startswith(param), error
    assert word in error["message"]


def test_a_model_without_a_place_for_tools_says_so(server: Server, own_key: str) -> None:
    error = post(server, own_key, {"tools": [TOOL]}).json()["error"]
    assert error["param"] == "tools"
    assert "template" in error["message"]


def test_what_is_not_enforced_is_said(shipped: Server, key: str) -> None:
    schema = {"type": "string", "format": "banana", "maxLength": 5}
    _, account = json_and_account(
        post(shipped, key, {"response_format": of_schema(schema), "max_tokens": 30})
    )
    (note,) = account["not_enforced"]
    assert note.startswith("response_format.json_schema.schema")
    assert "format" in note
