"""What is held for parts of a request that its server writes into the prompt in a way that is not known here.

Tools, arguments of a chat template and the like become text by the server's own template. Held are the tokens
of their JSON, written widely, and a part more; the server's usage decides. Pure but for tokenising.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from gateway.requests.inputs.media import contents_of, text_of

FIXED_TOKENS = {"tools": 512}
"""Held beyond a field's JSON: what templates explain about tools."""
OTHER_TOKENS = 64
"""The same of any other field."""
THOUGHTS = ("reasoning", "reasoning_content")
OF_ANSWERS = (*THOUGHTS, "refusal", "annotations")
"""Fields of an assistant's message that SDKs send back; only some servers' templates write them."""
PART_TOKENS = 8
"""Held for each text of a message that has several."""
PART_MORE = 4
"""A fourth of the JSON more: some templates repeat names, or write each value on a line of its own."""


class TextCounter(Protocol):
    """The part of a renderer that is needed here."""

    def text_tokens(self, text: str) -> list[int]: ...


def margin_ids(fields: Mapping[str, Any], names: Iterable[str], counter: TextCounter) -> list[int]:
    """What is held for the fields of these names, as ids that stand for tokens. Raises `PromptRefused`."""
    found: list[int] = []
    for name in sorted(names):
        if name in fields:
            text = json.dumps(fields[name], indent=4, ensure_ascii=False)
            ids = counter.text_tokens(text)
            more = len(ids) // PART_MORE + FIXED_TOKENS.get(name, OTHER_TOKENS)
            found += [*ids, *([0] * more)]
    return found


def as_counted(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The conversation as counted here: text parts on lines of their own, without images and thoughts."""
    if is_plain(messages):
        return messages
    return [
        {
            **{name: value for name, value in message.items() if name not in OF_ANSWERS},
            "content": message["content"] if message["content"] is None else text_of(message["content"]),
        }
        for message in messages
    ]


def is_plain(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether they are texts and calls of tools only."""
    for message in messages:
        if isinstance(message["content"], list) or not message.keys().isdisjoint(OF_ANSWERS):
            return False
    return True


def is_rendered_there(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether a part of the conversation becomes text by the server's own rules."""
    if is_plain(messages):
        return False
    return any(_beside_text(each) or _text_parts(each) > 1 for each in messages) or any(contents_of(messages))


def message_margin_ids(messages: Sequence[dict[str, Any]], counter: TextCounter) -> list[int]:
    """Held for thoughts and the like, and for text between parts. Raises `PromptRefused`."""
    found: list[int] = []
    for message in messages:
        for text in _beside_text(message):
            ids = counter.text_tokens(text)
            found += [*ids, *([0] * (len(ids) // PART_MORE + OTHER_TOKENS))]
        parts = _text_parts(message)
        if parts > 1:
            found += [0] * (PART_TOKENS * parts)
    return found


def _beside_text(message: Mapping[str, Any]) -> list[str]:
    if message.keys().isdisjoint(OF_ANSWERS):
        return []
    found = [message[name] for name in OF_ANSWERS if message.get(name)]
    return [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in found]


def _text_parts(message: Mapping[str, Any]) -> int:
    content = message["content"]
    return sum(part["type"] == "text" for part in content) if isinstance(content, list) else 0
