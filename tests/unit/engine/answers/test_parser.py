"""Recorded answers of each form, whole, cut at every place, and one character at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers.utils.chat_parsing import parse_response

from engine.answers.parser import MAX_CALLS, AnswerForms, AnswerParser
from engine.core.detokenizer import DetokenizerFactory
from engine.grammar.forms import form_from
from engine.messages import SamplingParams, Submit
from tests.models.tokenizers import KINDS

BOTH = ("reasoning_content", "tool_calls")
XML = {
    "start_anchor": "A:",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>"},
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        }
    },
}


def texts(*marks: str) -> DetokenizerFactory:
    tokenizer: Tokenizer = KINDS["byte-level"]()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return DetokenizerFactory(tokenizer)


def forms(own: dict[str, Any] | None, source: str) -> AnswerForms:
    form = form_from(own, source)
    assert form is not None
    return AnswerForms(form, texts())


FORMS = {
    "hermes": forms(None, '<tool_call>{"name":1,"arguments":2}</think>'),
    "llama": forms(None, "<|python_tag|></think>"),
    "mistral": forms(None, "[TOOL_CALLS]"),
    "xml": forms(XML, ""),
}


def answer(
    name: str, text: str, cuts: Iterable[int] = (), parts: tuple[str, ...] = BOTH, prefix: str = ""
) -> list[Any]:
    """Text as `t:...`, thoughts as `r:...`, a call as its name and arguments; neighbours joined."""
    parser = AnswerParser(FORMS[name], parts, prefix, "s")
    ends = [*cuts, len(text)]
    items = [
        item for start, end in zip([0, *ends], ends, strict=False) for item in parser.feed(text[start:end])
    ]
    said: list[Any] = []
    for item in items + parser.finish():
        if "tool_calls" not in item:
            ((kind, piece),) = item.items()
            kind = {"content": "t:", "reasoning_content": "r:"}[kind]
            if said and isinstance(said[-1], str) and said[-1].startswith(kind):
                said[-1] += piece
            else:
                said.append(kind + piece)
            continue
        (call,) = item["tool_calls"]
        if "id" in call:
            said.append([call["function"]["name"], ""])
        said[-1][1] += call["function"]["arguments"]
        assert call["index"] == sum(isinstance(each, list) for each in said) - 1
    return said


CALL = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
RECORDED = [
    ("hermes", f"Let me see.\n\n{CALL}\n{CALL}\n", ["t:Let me see.", ["f", '{"a":1}'], ["f", '{"a":1}']]),
    ("hermes", f"<think>\nwell\n</think>\n\n{CALL}", ["r:well", ["f", '{"a":1}']]),
    ("hermes", "\n Hi  there <b>\n", ["t:\n Hi  there <b>\n"]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>\\"{\\\\"}}\n</tool_call>',
     [["f", '{"a": "}</tool_call>\\"{\\\\"}']]),
    ("hermes", '<tool_call>{"arguments": {"a":1}, "name": "f"}</tool_call> So', [["f", '{"a": 1}'], "t:So"]),
    ("hermes", '<tool_call>{"name":"f","arguments":"{}"}</tool_call><tool_call>{"name":"g"}</tool_call>',
     [["f", "{}"], ["g", "{}"]]),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":[1', [["f", '{"a":[1']]),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":1}</tool_call> So', [["f", '{"a":1}'], "t:So"]),
    ("hermes", 'A <tool_call>{"na', ['t:A <tool_call>{"na']),
    ("hermes", "A <tool_call> no <tool", ["t:A <tool_call> no <tool"]),
    ("hermes", f'<tool_call>{{"x":1}}</tool_call>\n{CALL}',
     ['t:<tool_call>{"x":1}</tool_call>', ["f", '{"a":1}']]),
    ("hermes", f"<tool_call>{CALL}", ["t:<tool_call>", ["f", '{"a":1}']]),
    ("hermes", '<tool_call>{"name":"","arguments":{}}</tool_call>',
     ['t:<tool_call>{"name":"","arguments":{}}</tool_call>']),
    ("llama", '\n{"name": "f", "parameters": {"a": {"b": 2}}}', [["f", '{"a": {"b": 2}}']]),
    ("llama", '<think>w</think>\n{"name": "f", "parameters": {}} So', ["r:w", ["f", "{}"], "t:So"]),
    ("llama", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', [["f", "{}"]]),
    ("llama", '{"answer": {"name": "f"}}\n', ['t:{"answer": {"name": "f"}}\n']),
    ("llama", 'It is {"name": "f", "parameters": {}}', ['t:It is {"name": "f", "parameters": {}}']),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
     [["f", '{"a": 1}'], ["g", "{}"]]),
    ("mistral", 'So [TOOL_CALLS][{"name": "f"', ['t:So [TOOL_CALLS][{"name": "f"']),
    ("xml", "So\n<tool_call>\n<function=f>\n<parameter=a>\n1 <b>\n</parameter></function></tool_call>\nAnd",
     ["t:So", ["f", '{"a": "1 <b>"}'], "t:And"]),
    ("xml", "So\n<tool_call>\n<function=f>\n<parameter=a>1</parameter>",
     ["t:So\n<tool_call>\n<function=f>\n<parameter=a>1</parameter>"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "said"), RECORDED)
def test_a_recorded_answer_however_it_is_cut(name: str, text: str, said: list[Any]) -> None:
    for cuts in [(), range(len(text)), *([at] for at in range(len(text)))]:
        assert answer(name, text, cuts) == said, list(cuts)


@pytest.mark.parametrize(("name", "text", "said"), [RECORDED[at] for at in (0, 1, 2, 13, 18)])
def test_transformers_parser_reads_the_same(name: str, text: str, said: list[Any]) -> None:
    message = parse_response(text, FORMS[name].form.response_template, prefix="")
    value = message.get("tool_calls", [])
    calls = [each["function"] for each in (value if isinstance(value, list) else [value])]
    told = [(each[0], json.loads(each[1])) for each in said if isinstance(each, list)]
    assert [(call["name"], call["arguments"]) for call in calls] == told
    assert message.get("reasoning_content", "") == "".join(each[2:] for each in said if each[0] == "r")


def test_what_is_not_asked_for_stays_as_it_was_written() -> None:
    text = f"<think>a {CALL}</think>\n\n{CALL} So"
    assert answer("hermes", text, (), ("tool_calls",)) == [
        f"t:<think>a {CALL}</think>",
        ["f", '{"a":1}'],
        "t:So",
    ]
    assert answer("hermes", text, (), ("reasoning_content",)) == [f"r:a {CALL}", f"t:{CALL} So"]
    assert answer("hermes", "a</think>\n\n b", (), BOTH, "<think>") == ["r:a", "t:b"]
    assert answer("hermes", "\n\n b", (), BOTH, "<think>\n\n</think>") == ["t:b"]


def test_a_name_is_told_at_once_and_arguments_as_they_come() -> None:
    parser = AnswerParser(FORMS["hermes"], BOTH, "", "s")
    assert parser.feed('Hm <tool_call>{"name":"f') == [{"content": "Hm"}]
    items = parser.feed('"')
    call_id = items[0]["tool_calls"][0]["id"]
    function = {"name": "f", "arguments": ""}
    assert items == [{"tool_calls": [{"index": 0, "id": call_id, "type": "function", "function": function}]}]
    pieces = [parser.feed(piece) for piece in (',"arguments":', "{", '"a": 1', "}", "}")]
    told = [{"tool_calls": [{"index": 0, "function": {"arguments": each}}]} for each in ("{", '"a": 1', "}")]
    assert pieces == [[], *([each] for each in told), []]
    ids = [
        AnswerParser(FORMS["hermes"], BOTH, "", name).feed(CALL)[0]["tool_calls"][0]["id"] for name in "st"
    ]
    assert ids[0] == call_id != ids[1]
    assert AnswerParser(FORMS["llama"], BOTH, "", "s").feed('{"answer": {') == [{"content": '{"answer": {'}]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("piece", ["word ", "<tool_call", " \n", '<tool_call>{"id":"', '{"name":"f', CALL])
def test_a_long_answer_holds_a_bounded_text(name: str, piece: str) -> None:
    parser = AnswerParser(FORMS[name], BOTH, "", "s")
    calls, held = 0, 0
    for _ in range(2_000):
        calls += sum("tool_calls" in item for item in parser.feed(piece))
        held = max(held, len(parser._text) + len(parser._space))
    assert held < 2_200
    assert calls <= 2 * MAX_CALLS


def test_marks_that_are_special_tokens_are_shown() -> None:
    factory = texts("<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>")
    encode = factory._tokenizer.encode
    opened = AnswerForms(FORMS["hermes"].form, factory)
    assert sorted(opened.marks.values()) == ["</tool_call>", "<tool_call>"]
    text = factory.open([], SamplingParams(), opened.marks)
    token_ids = encode("𝕏").ids[:1] + encode(f"{CALL}<|im_end|> ü").ids
    assert "".join(map(text.push, token_ids)) + text.flush() == f"\N{REPLACEMENT CHARACTER}{CALL} ü"
    prompt = encode("<|im_start|>user\n<think><|im_start|>assistant\n<think>\n").ids
    submit = Submit("s", "r", "t", prompt, 9, 9, parts=BOTH)
    parser = opened.open(submit)
    assert parser is not None
    assert parser.feed("a</think>b") == [{"reasoning_content": "a"}, {"content": "b"}]
    assert opened.open(Submit("s", "r", "t", prompt, 9, 9)) is None
