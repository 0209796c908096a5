"""What is held for parts of a prompt that only its server can count."""

from __future__ import annotations

from typing import Any

from gateway.requests.inputs.uncounted import (
    FIXED_TOKENS,
    OTHER_TOKENS,
    PART_TOKENS,
    as_counted,
    is_rendered_there,
    margin_ids,
    message_margin_ids,
)
from gateway.requests.prompt import EstimatedRenderer
from tests.unit.gateway.requests.test_parse import Letters


def test_nothing_is_held_for_what_is_counted() -> None:
    assert margin_ids({"temperature": 1}, {"tools"}, Letters()) == []


def test_tools_are_held_as_their_json_and_more() -> None:
    """Indented: templates write tools over several lines."""
    fields = {"tools": [{"a": 1}], "chat_template_kwargs": {}, "min_tokens": 3}
    found = margin_ids(fields, {"tools", "chat_template_kwargs"}, Letters())
    tools = len('[\n    {\n        "a": 1\n    }\n]')
    assert len(found) == 2 + 2 // 4 + OTHER_TOKENS + tools + tools // 4 + FIXED_TOKENS["tools"]


def test_without_a_tokenizer_bytes_are_held() -> None:
    found = margin_ids({"documents": "é" * 100}, {"documents"}, EstimatedRenderer())
    assert len(found) == 101 + 101 // 4 + OTHER_TOKENS


def test_thoughts_and_texts_in_parts_are_counted_without_them_and_held_with_a_margin() -> None:
    plain: dict[str, Any] = {"role": "user", "content": "hi"}
    thoughtful = {"role": "assistant", "content": "so", "reasoning_content": "x" * 40}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    conversation = [plain, thoughtful, parts]
    assert as_counted(conversation) == [
        plain, {"role": "assistant", "content": "so"}, {"role": "user", "content": "a\nb"}
    ]  # fmt: skip
    assert len(message_margin_ids(conversation, Letters())) == 40 + 40 // 4 + OTHER_TOKENS + 2 * PART_TOKENS
    assert is_rendered_there(conversation)


def test_plain_texts_and_one_part_are_counted_exactly() -> None:
    calls: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}
    one = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    assert not is_rendered_there([calls, one])
    assert message_margin_ids([calls, one], Letters()) == []
    assert as_counted([calls]) == [calls]
    assert as_counted([one]) == [{"role": "user", "content": "a"}]


def test_refusals_and_annotations_are_held_as_their_text() -> None:
    said = {"role": "assistant", "content": "", "refusal": "no", "annotations": [{"a": 1}]}
    assert as_counted([said]) == [{"role": "assistant", "content": ""}]
    assert len(message_margin_ids([said], Letters())) == 2 + len('[{"a": 1}]') * 5 // 4 + 2 * OTHER_TOKENS
