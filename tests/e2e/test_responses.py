"""Responses on a running server, by OpenAI's SDK: text on our own engine, tools and schemas by rule."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.support.rule_server import MODEL
from tests.support.server_process import MODEL as OWN_MODEL
from tests.support.server_process import Server

TOOLS: Any = [
    {
        "type": "function",
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
            "required": ["a", "note"],
            "additionalProperties": False,
        },
        "strict": True,
    },
    {"type": "web_search"},
]
ASKED = "Call add with 3 and 'three'."


class Person(BaseModel):
    """What the SDK parses an answer into."""

    name: str
    age: int


@pytest.fixture(scope="module")
def ruled(gateway: Server) -> Iterator[OpenAI]:
    key = gateway.tenant("responses")
    with OpenAI(api_key=key, base_url=f"{gateway.url}/v1", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def own(server: Server) -> Iterator[OpenAI]:
    key = server.tenant("responses")
    with OpenAI(api_key=key, base_url=f"{server.url}/v1", max_retries=0) as made:
        yield made


def test_our_own_engine_says_the_same_whole_and_streamed(own: OpenAI) -> None:
    asked: Any = {"model": OWN_MODEL, "input": "hello", "temperature": 0, "max_output_tokens": 6}
    whole = own.responses.create(**asked, extra_body={"ignore_eos": True})
    with own.responses.stream(**asked, extra_body={"ignore_eos": True}) as stream:
        events = list(stream)
    last: Any = events[-1]
    assert (whole.status, last.type) == ("incomplete", "response.incomplete")
    assert last.response.output_text == whole.output_text != ""
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    for response in (whole, last.response):
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.store is False
        assert response.usage.output_tokens == response.fairgate["actual"]["output_tokens"] == 6


def test_an_answer_is_parsed_into_a_type(ruled: OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "The person 'Ada' is 36.", "text_format": Person}
    assert ruled.responses.parse(**asked).output_parsed == Person(name="Ada", age=36)
    with ruled.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_parsed == Person(name="Ada", age=36)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_loop_of_tools_ends_with_an_answer(ruled: OpenAI, is_stream: bool) -> None:
    """The client sends back what it was answered; a search that only OpenAI runs is left out with a note."""
    items: list[Any] = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": ASKED}]
    for turn in range(2):
        asked: Any = {"model": MODEL, "input": items, "tools": TOOLS, "store": False}
        if is_stream:
            with ruled.responses.stream(**asked) as stream:
                answer: Any = stream.get_final_response()
        else:
            answer = ruled.responses.create(**asked)
        assert answer.status == "completed"
        assert [each["param"] for each in answer.fairgate["left_out"]] == ["tools[1]"]
        assert answer.usage.output_tokens == answer.fairgate["actual"]["output_tokens"] > 0
        if turn == 0:
            (call,) = answer.output
            assert (call.type, call.name) == ("function_call", "add")
            assert json.loads(call.arguments) == {"a": 3, "note": "three"}
            items += answer.output
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "seven"})
    assert answer.output_text == "It says: seven"


def test_a_refusal_names_the_clients_own_field(ruled: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ruled.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    assert "send the conversation so far in 'input'" in refused.value.message
