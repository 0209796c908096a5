"""What a request makes of our own engine's answer: its grammar, its parts, and what cannot be done."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.grammar.forms import form_from
from gateway.errors import ApiError
from gateway.requests.fields.checked_answers import MOST_EACH, CheckedAnswers, NeedsThread
from gateway.requests.fields.own_answer import (
    PLAIN_FORM,
    SCHEMA,
    OwnAnswer,
    OwnForm,
    own_answer,
    own_capabilities,
)

BYTES = LLTokenizer("byte")
HERMES_TEMPLATE = '<tool_call>\n {"name": , "arguments": }\n</tool_call>'
HERMES = OwnForm(form_from(None, HERMES_TEMPLATE))
THINKING = OwnForm(form_from(None, "<think></think>" + HERMES_TEMPLATE))
XML = OwnForm(
    form_from({"version": 1, "fields": {"tool_calls": {"open": "<f>", "content": "xml-inline"}}}, "")
)
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WORD = {"type": "object", "properties": {"x": {"enum": ["p", "q"]}}, "required": ["x"]}
JSON = '{"x":"p"}'


def tool(name: str, schema: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema or NUMBER, **more}}


def call(name: str) -> str:
    return f'<tool_call>\n{{"name":"{name}","arguments":{{"a":3}}}}\n</tool_call>'


def json_schema(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def allows(answer: OwnAnswer, text: str) -> bool:
    assert answer.grammar is not None
    matcher = LLMatcher(BYTES, answer.grammar.source)
    ids = BYTES.tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def answer(form: OwnForm = HERMES, *, is_open: bool = False, **fields: Any) -> OwnAnswer:
    return own_answer(fields, form, is_open=is_open)


ADD, SUB = call("add"), call("sub")
TOOLS = [tool("add"), tool("sub")]
NAMED = {"type": "function", "function": {"name": "sub"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}


@pytest.mark.parametrize(
    ("fields", "yes", "no"),
    [
        ({"response_format": json_schema(WORD)}, [JSON], ["hello", '{"x":"r"}', '{"x":"p","y":1}']),
        ({"response_format": json_schema(WORD, strict=True)}, [JSON], ["hello"]),
        ({"response_format": {"type": "json_object"}}, [JSON, "{}"], ["3", "hello"]),
        ({"structured_outputs": {"json": WORD, "regex": None}}, [JSON], ["hello"]),
        ({"guided_json": '{"enum": [1, 2]}'}, ["2"], ["3"]),
        ({"structured_outputs": {"regex": "a+b"}}, ["aab"], ["b"]),
        ({"guided_choice": ["yes", "no"]}, ["yes"], ["maybe"]),
        ({"guided_grammar": 'root ::= "x" | "y"'}, ["y"], ["z"]),
        ({"tools": TOOLS, "tool_choice": "required"}, [ADD, SUB + "\n" + ADD], ["hi"]),
        ({"tools": TOOLS, "parallel_tool_calls": False}, [ADD, "hi"], [SUB + "\n" + ADD]),
        ({"tools": TOOLS, "tool_choice": NAMED}, [SUB], [ADD, "hi", SUB + "\n" + SUB]),
        ({"tools": TOOLS, "tool_choice": ALLOWED}, [SUB, "hi"], [ADD]),
        ({"tools": [tool("add", strict=True)]}, [ADD, "hi"], [SUB]),
        ({"tools": TOOLS, "response_format": json_schema(WORD)}, [ADD, JSON], ["hi"]),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": json_schema(WORD)}, [ADD], [JSON]),
    ],
)  # fmt: skip
def test_the_grammar_is_what_was_asked_for(fields: dict[str, Any], yes: list[str], no: list[str]) -> None:
    made, thinking = answer(**fields), answer(THINKING, **fields)
    opened = answer(THINKING, is_open=True, **fields)
    for text, is_allowed in [*((each, True) for each in yes), *((each, False) for each in no)]:
        assert allows(made, text) == is_allowed, text
        assert allows(thinking, f"<think>hm</think>\n\n{text}") == is_allowed, text
        assert allows(opened, f"hm</think>\n\n{text}") == is_allowed, text
    assert thinking.parts == ("reasoning_content", *made.parts)
    assert made.parts == (("tool_calls",) if "tools" in fields else ())


def test_tools_that_the_model_may_call_as_it_likes_are_only_told_apart() -> None:
    assert answer(tools=TOOLS) == OwnAnswer(None, ("tool_calls",))
    assert answer(THINKING) == OwnAnswer(None, ("reasoning_content",))
    assert answer(PLAIN_FORM) == OwnAnswer()
    loose = answer(XML, tools=[tool("add", strict=True)])
    assert (loose.grammar, loose.parts) == (None, ("tool_calls",))
    assert loose.not_enforced[0].startswith("tools[0].function.strict: ")


def test_what_is_not_enforced_is_said_with_its_field() -> None:
    loose = {"type": "object", "properties": {"f": {"type": "string", "format": "banana"}}}
    found = answer(
        tools=[tool("add"), tool("sub", loose)], tool_choice=ALLOWED, response_format=json_schema(loose)
    )
    assert found.not_enforced == (
        "tools[1].function.parameters: /properties/f/format",
        "response_format.json_schema.schema: /properties/f/format",
    )
    many = {"type": "object", "properties": {f"f{n}": loose["properties"]["f"] for n in range(20)}}
    assert len(answer(guided_json=many).not_enforced) == 8


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": json_schema({"type": "wrong"})}, SCHEMA, "wrong"),
        ({"response_format": json_schema({"$ref": "#/no"})}, SCHEMA, "/no"),
        ({"guided_json": {"type": "string", "pattern": "(?=a)b"}}, "guided_json", "look-around"),
        ({"guided_json": "{"}, "guided_json", "no JSON"),
        ({"guided_json": "[1]"}, "guided_json", "JSON object"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "hm"}, "guided_grammar", "neither"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice", "list of texts"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex", "a text"),
        ({"structured_outputs": {"whitespace_pattern": " "}},
         "structured_outputs.whitespace_pattern", "leave"),
        ({"structured_outputs": {}}, "structured_outputs", "one of json, regex, choice, grammar"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "one of json"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "send one"),
        ({"tools": [tool("a"), tool("b", {"type": "wrong"})], "tool_choice": "required"},
         "tools[1].function.parameters", "wrong"),
    ],
)  # fmt: skip
def test_what_cannot_be_ensured_is_refused_with_its_field_and_the_way_out(
    fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(ApiError) as caught:
        answer(**fields)
    refused = caught.value
    assert (refused.status, refused.param) == (400, param)
    assert said in refused.message
    assert refused.message.endswith(".")
    assert "\n" not in refused.message


def test_json_beside_tools_of_an_unknown_form_is_refused() -> None:
    with pytest.raises(ApiError, match="cannot be taken together"):
        answer(XML, tools=TOOLS, response_format={"type": "json_object"})


def test_a_model_can_what_its_template_has_a_place_for() -> None:
    json_words = {"text", "json_object", "json_schema"}
    assert own_capabilities(PLAIN_FORM, lambda _: True).words == json_words | {"reasoning"}
    assert own_capabilities(HERMES, lambda _: False).words == json_words
    reads_tools = "tools".__eq__
    assert own_capabilities(HERMES, reads_tools).words == json_words | {"tools", "forced_tools"}
    assert own_capabilities(XML, reads_tools).words == json_words | {"tools"}
    assert (
        own_capabilities(XML, reads_tools).lacks(["field:guided_choice", "field:structured_outputs"]) is None
    )


def test_a_schema_is_checked_once_for_a_tenant_and_never_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    def counted(fields: Any, form: OwnForm, **how: Any) -> OwnAnswer:
        made.append(fields)
        return own_answer(fields, form, **how)

    monkeypatch.setattr("gateway.requests.fields.checked_answers.own_answer", counted)
    checked = CheckedAnswers()

    def ask(fields: dict[str, Any], *, tenant_id: str = "t", is_on_loop: bool = True) -> OwnAnswer:
        return checked.of(
            fields, HERMES, tenant_id=tenant_id, model="m", is_open=False, is_on_loop=is_on_loop
        )

    good, bad = {"guided_regex": "a+", "seed": 1}, {"guided_regex": "("}
    for fields in (good, bad):
        with pytest.raises(NeedsThread):
            ask(fields)
    first = ask(good, is_on_loop=False)
    for is_on_loop in (False, True):
        with pytest.raises(ApiError, match="unclosed"):
            ask(bad, is_on_loop=is_on_loop)
    assert ask(good | {"seed": 2}) is first
    assert made == [{"guided_regex": "a+"}, bad]
    with pytest.raises(NeedsThread):
        ask(good, tenant_id="another")
    for number in range(MOST_EACH):
        ask({"guided_choice": [str(number)]}, is_on_loop=False)
    with pytest.raises(NeedsThread):
        ask(good)
    assert ask({"temperature": 0}) == OwnAnswer(), "plain text needs no thread"
    assert ask({"guided_choice": ["0"]}).grammar is not None
    monkeypatch.setattr("gateway.requests.fields.checked_answers.MOST_BYTES", 3 * 1024)
    ask(good, tenant_id="another", is_on_loop=False)
    with pytest.raises(NeedsThread):
        ask({"guided_choice": ["1"]})
    assert ask(good, tenant_id="another") == first
