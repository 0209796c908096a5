"""Which form a model directory has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.grammar.forms import CallForm, form_from, form_of

QWEN = r"{% if tools %}{{ '<tool_call>\n{\"name\": N, \"arguments\": A}' }}{% endif %}<think></think>"
HERMES_CALL = CallForm("<tool_call>\n", "\n</tool_call>", "name", "arguments")
COMPACT_CALL = CallForm("<tool_call>", "</tool_call>", "name", "arguments")
MISTRAL_CALL = CallForm("[TOOL_CALLS] ", "", "name", "arguments", ",", as_list=True)
LLAMA_CALL = CallForm("", "", "name", "parameters")
OWN = {
    "start_anchor_pattern": r"<\|turn>model\n",
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {"open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>"},
        "content": {"close": "<turn|>"},
    },
}


@pytest.mark.parametrize(
    ("source", "calls", "thoughts"),
    [
        (QWEN, HERMES_CALL, ("<think>", "</think>")),
        ('<tool_call>{"name":1,"arguments":2}', COMPACT_CALL, None),
        ('{{ "[TOOL_CALLS] [" }}', MISTRAL_CALL, None),
        ('{"name": "f", "parameters": {}}', LLAMA_CALL, None),
        ("<|python_tag|>", LLAMA_CALL, None),
        ("{{ content.split('</think>')[-1] }}", None, ("<think>", "</think>")),
    ],
)
def test_marks_of_a_chat_template(
    source: str, calls: CallForm | None, thoughts: tuple[str, str] | None
) -> None:
    form = form_from(None, source)
    assert form is not None
    assert (form.calls, form.thoughts, form.has_calls) == (calls, thoughts, calls is not None)


@pytest.mark.parametrize(
    "source", ["{{ messages }}", '<tool_call>\n<function=f> "arguments"', "[TOOL_CALLS]f[ARGS]{}"]
)
def test_no_form_that_is_known(source: str) -> None:
    assert form_from(None, source) is None


def test_a_models_own_template_goes_first(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": QWEN, "response_template": OWN})
    )
    form = form_of(tmp_path)
    assert form is not None
    assert (form.response_template, form.calls, form.has_calls) == (OWN, None, True)
    assert form.thoughts == ("<|channel>thought\n", "<channel|>")
    shown = ["<|tool_call>", "<tool_call|>", "<channel|>", "<turn|>", "<eos>"]
    assert [form.spells(mark) for mark in shown] == [True, True, True, False, False]
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert form_of(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text(QWEN)
    assert form_of(tmp_path) == form_from(None, QWEN)


@pytest.mark.parametrize(
    ("prompt", "said", "is_open"),
    [
        ("<think><|im_start|>assistant\n", "", False),
        ("<|im_start|>assistant\nA<|im_start|>assistant\n<think>\n", "<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "<think>\n\n</think>", False),
        ("another opening: <think>\n", "<think>", True),
        ("another opening", "", False),
    ],
)
def test_what_the_prompt_says_of_the_answer(prompt: str, said: str, is_open: bool) -> None:
    form = form_from(None, QWEN)
    assert form is not None
    assert (form.said_before(prompt), form.opens_thoughts(prompt)) == (said, is_open)
