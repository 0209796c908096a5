"""What a request's fields need of a server, and what of them never passes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.requests.fields.bounds import MAX_FIELD_CHARACTERS, MAX_FIELD_DEPTH, MAX_FIELD_VALUES
from gateway.requests.fields.passed import Passed, passed_of_chat, passed_of_text
from gateway.requests.fields.tools import MAX_TOOLS
from gateway.requests.passed_fields import CHAT_FIELDS, KIND_FIELD_NAMES, TEXT_FIELDS
from gateway.requests.schemas import ChatCompletionRequest, CompletionRequest, decode
from gateway.upstream.capabilities import Capabilities
from gateway.upstream.openai.request import fields_for
from gateway.upstream.openai.server_kinds import (
    IDLE_VALUES,
    KIND_FIELDS,
    KIND_TRIALS,
    OPENAI_FIELDS,
    PROMPT_FIELDS,
    REFUSED_FIELDS,
    TEMPLATE_ARGUMENTS_REFUSED,
)
from tests.support.documents import ROOT

TOOL: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


def chat(**fields: Any) -> Passed:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]} | fields
    return passed_of_chat(decode(json.dumps(body).encode(), ChatCompletionRequest))


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    return caught.value


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({}, {}),
        ({"tools": []}, {}),
        ({"tool_choice": "none"}, {}),
        ({"tool_choice": "auto", "tools": []}, {}),
        ({"tools": [TOOL], "tool_choice": "none"}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"parallel_tool_calls": True}, {}),
        ({"tools": [TOOL]}, {"tools": "tools"}),
        ({"tools": [TOOL], "tool_choice": "auto"}, {"tools": "tools"}),
        ({"tools": [TOOL], "tool_choice": "required"}, {"forced_tools": "tool_choice"}),
        ({"tools": [TOOL], "tool_choice": TOOL}, {"forced_tools": "tool_choice"}),
        ({"response_format": {"type": "json_object"}}, {"json_object": "response_format"}),
        ({"response_format": SCHEMA}, {"json_schema": "response_format"}),
        ({"response_format": {"type": "structural_tag"}}, {"field:structural_tag": "response_format"}),
        ({"reasoning_effort": "low"}, {"reasoning": "reasoning_effort"}),
        ({"reasoning_effort": 0.5}, {"reasoning": "reasoning_effort"}),
        ({"reasoning": {"effort": "low"}}, {"reasoning": "reasoning"}),
        ({"reasoning": {"effort": "low", "exclude": True}}, {"field:reasoning": "reasoning"}),
        ({"enable_thinking": True}, {"field:enable_thinking": "enable_thinking"}),
        ({"thinking": {"type": "enabled"}}, {"field:thinking": "thinking"}),
        ({"verbosity": "low"}, {"field:verbosity": "verbosity"}),
        ({"min_tokens": 3}, {"field:min_tokens": "min_tokens"}),
        ({"chat_template_kwargs": {"a": 1}}, {"field:chat_template_kwargs": "chat_template_kwargs"}),
    ],
)
def test_a_field_needs_a_server_that_takes_it(fields: dict[str, Any], needs: dict[str, str]) -> None:
    assert chat(**fields).needs == needs | {"text": "model"}


IDLE = {name: value for name, value in IDLE_VALUES.items() if name not in TEXT_FIELDS}


def test_what_asks_for_nothing_needs_no_server_and_reaches_one_that_takes_it() -> None:
    for name, value in IDLE.items():
        asked = chat(**{name: value})
        assert (asked.needs, asked.fields) == ({"text": "model"}, {name: value})
        need = "reasoning" if name == "reasoning_effort" else f"field:{name}"
        for offers, fields in ((frozenset({need}), {name: value}), (frozenset({"field:x"}), {})):
            assert fields_for(asked.fields, Capabilities(offers), 9) == fields
        asked.leave_out_idle(frozenset())
        assert not asked.fields
        assert not asked.changes_prompt
    none = chat(reasoning={"effort": "none"})
    assert (none.needs, none.fields) == ({"text": "model"}, {"reasoning_effort": "none"})


def test_a_hint_for_a_cache_is_taken_from_tools() -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    tool = TOOL | hint | {"function": TOOL["function"] | hint}
    assert chat(tools=[tool]).fields == {"tools": [TOOL]}


def test_a_body_that_is_understood_again_for_the_next_model_of_a_chain_says_the_same() -> None:
    body = b'{"model": "m", "messages": [], "reasoning": {"effort": "low"}}'
    request = decode(body, ChatCompletionRequest)
    first, again = passed_of_chat(request), passed_of_chat(request)
    assert first.fields == again.fields == {"reasoning_effort": "low"}


def test_what_passes_is_what_the_client_sent() -> None:
    sent = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "bad_words": ["x"]}
    assert chat(**sent).fields == sent
    assert chat(tools=[], tool_choice="auto", parallel_tool_calls=True).fields == {}
    text = {"response_format": SCHEMA, "stop_token_ids": [1], "echo": True, "suffix": "x"}
    body = {"model": "m", "prompt": "hi"} | text
    passed = passed_of_text(decode(json.dumps(body).encode(), CompletionRequest))
    assert passed.fields == text
    named = {"json_schema", "field:stop_token_ids", "field:echo", "field:suffix", "text"}
    assert passed.needs.keys() == named


def test_only_what_the_server_renders_makes_a_prompt_uncountable() -> None:
    assert chat(tools=[TOOL]).changes_prompt
    assert chat(chat_template_kwargs={"enable_thinking": False}).changes_prompt
    assert not chat(response_format=SCHEMA, min_tokens=3).changes_prompt


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": [TOOL] * (MAX_TOOLS + 1)}, "tools", "the most is 128"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "'function'"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "object"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
            "schema",
        ),
        ({"tool_choice": "required"}, "tool_choice", "no 'tools'"),
        ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice", "'required'"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
            "names 'other', which is not one of 'tools' (",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "one of the tools"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "'name'"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort", "minimal"),
        ({"reasoning_effort": 2.0}, "reasoning_effort", "minimal"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning", "minimal"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", ">= 0"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "<= 20"),
        ({"chat_template_kwargs": {"chat_template": "{{x}}"}}, "chat_template_kwargs", "chat_template"),
        ({"chat_template_kwargs": {"a": deep(MAX_FIELD_DEPTH)}}, "chat_template_kwargs", "nested"),
        ({"structured_outputs": {"json": list(range(MAX_FIELD_VALUES))}}, "structured_outputs", "values"),
        ({"guided_regex": "a" * (MAX_FIELD_CHARACTERS + 1)}, "guided_regex", "characters"),
        ({"structured_outputs": {"a" * (MAX_FIELD_CHARACTERS + 1): 1}}, "structured_outputs", "characters"),
        ({"modalities": ["audio"]}, "modalities", "text"),
        ({"prediction": {}}, "prediction", "metered"),
        ({"functions": [{}]}, "functions", "'tools'"),
    ],
)
def test_what_is_out_of_shape_or_bounds_is_refused_with_its_field(
    fields: dict[str, Any], param: str, said: str
) -> None:
    error = refusal(**fields)
    assert (error.status, error.param) == (400, param)
    assert said in error.message


@pytest.mark.parametrize("name", sorted(REFUSED_FIELDS))
def test_a_field_of_a_server_that_never_passes_says_why(name: str) -> None:
    error = refusal(**{name: 1})
    assert (error.code, error.param) == ("unsupported_parameter", name)
    assert REFUSED_FIELDS[name] in error.message


def test_the_lists_of_fields_go_together() -> None:
    known = {*CHAT_FIELDS, *TEXT_FIELDS, *KIND_FIELD_NAMES}
    of_kinds = frozenset().union(*KIND_FIELDS.values())
    assert known == of_kinds, (
        "what a kind of server takes has its place in a request, and the other way round"
    )
    assert set(CHAT_FIELDS) <= set(ChatCompletionRequest.__struct_fields__)
    assert {*TEXT_FIELDS, *KIND_FIELD_NAMES} <= set(CompletionRequest.__struct_fields__)
    assert IDLE_VALUES.keys() <= of_kinds | OPENAI_FIELDS
    assert not (of_kinds | OPENAI_FIELDS) & REFUSED_FIELDS.keys()
    assert PROMPT_FIELDS.issubset(of_kinds | OPENAI_FIELDS)
    for kind, fields in KIND_TRIALS.items():
        assert fields.keys() <= KIND_FIELDS[kind]
    assert "chat_template" in TEMPLATE_ARGUMENTS_REFUSED


def test_the_docs_say_of_every_field_what_becomes_of_it() -> None:
    page = (ROOT / "docs" / "upstreams.md").read_text().partition("### Every field of a request")[2]
    section = page.partition("\n## ")[0]
    for kind in (ChatCompletionRequest, CompletionRequest):
        missing = {name for name in kind.__struct_fields__ if f"`{name}`" not in section}
        assert not missing


def test_a_body_nested_as_deep_as_json_is_read_is_refused_and_does_no_harm() -> None:
    body = b'{"model": "m", "messages": [], "chat_template_kwargs": ' + b'{"a":' * 900 + b"1" + b"}" * 901
    with pytest.raises(ApiError):
        passed_of_chat(decode(body, ChatCompletionRequest))
