"""Parts of a chat answer beside its text: tool calls, reasoning, refusals, annotations. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.upstream.base import Part

MAX_CALLS = 128
"""Of one answer, and fragments of them in one chunk."""
MAX_WORD_CHARACTERS = 256
MAX_ID_CHARACTERS = 4096
"""Some services put a signature of the reasoning there."""
MAX_ANNOTATION_BYTES = 64 * 1024
MAX_DEPTH = 16
"""Of nested values in an annotation."""


class Garbage(Exception):
    """What a server sent is not part of an answer: not in OpenAI's shape, or too large."""


class SaidFunction(msgspec.Struct):
    """A called function, or a fragment of it."""

    name: str | None = None
    arguments: str | None = None


class SaidCall(msgspec.Struct):
    """A tool call, or a fragment of it."""

    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: SaidFunction | None = None


_NO_ANNOTATIONS = msgspec.Raw(b"null")


class Said(msgspec.Struct):
    """A server's message, or one delta of it."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's newer name; some versions send both."""
    refusal: str | None = None
    function_call: SaidFunction | None = None
    tool_calls: list[SaidCall] | None = None
    annotations: msgspec.Raw = _NO_ANNOTATIONS

    @property
    def has_parts(self) -> bool:
        plain = self.reasoning_content or self.reasoning or self.refusal
        if plain or self.tool_calls or self.function_call:
            return True
        return self.annotations is not _NO_ANNOTATIONS and bytes(self.annotations) != b"null"


class AnswerPart(msgspec.Struct, frozen=True):
    """A part as it is passed on, and what counts of it."""

    value: Part
    text: str = ""
    """The generated text in it."""
    is_plain: bool = False
    """`text` is the only member of `value`, unchanged: it can be cut."""
    is_generated: bool = True
    """At least one token."""
    uncounted: int = 0
    """Characters that do not count as tokens."""

    def cut(self, characters: int) -> tuple[AnswerPart, AnswerPart]:
        first, rest = self.text[:characters], self.text[characters:]
        return (
            AnswerPart(dict.fromkeys(self.value, first), first, is_plain=True),
            AnswerPart(dict.fromkeys(self.value, rest), rest, is_plain=True),
        )


def parts_before(said: Said) -> list[AnswerPart]:
    """Parts before the text: reasoning, under the server's name for it."""
    named = {"reasoning_content": said.reasoning_content, "reasoning": said.reasoning}
    texts = {name: text for name, text in named.items() if text}
    if len(set(texts.values())) == 1:  # under both names it is the same text, generated once
        return [AnswerPart(texts, next(iter(texts.values())), is_plain=True)]
    return [AnswerPart({name: text}, text, is_plain=True) for name, text in texts.items()]


def parts_after(said: Said, *, is_whole: bool) -> list[AnswerPart]:
    """Parts after the text. Raises `Garbage`."""
    parts: list[AnswerPart] = []
    if said.refusal:
        parts.append(AnswerPart({"refusal": said.refusal}, said.refusal, is_plain=True))
    if said.function_call is not None:
        function = _function(said.function_call)
        parts.append(AnswerPart({"function_call": function}, _text(function)))
    calls = said.tool_calls or ()
    if len(calls) > MAX_CALLS:
        raise Garbage(f"more than {MAX_CALLS} tool calls")
    parts += [_tool_call(call, position, is_whole=is_whole) for position, call in enumerate(calls)]
    data = bytes(said.annotations)
    if annotations := _annotations(data):
        parts.append(AnswerPart({"annotations": annotations}, is_generated=False, uncounted=len(data)))
    return parts


def _tool_call(call: SaidCall, position: int, *, is_whole: bool) -> AnswerPart:
    index = position if is_whole or call.index is None else call.index
    if not 0 <= index < MAX_CALLS:
        raise Garbage(f"a tool call's index is not one of 0 to {MAX_CALLS - 1}")
    if is_whole and call.function is None:
        raise Garbage("a tool call without a function")
    shown: dict[str, Any] = {"index": index}
    words = {"id": call.id, "type": call.type}
    for name, word in words.items():
        if word is not None:
            shown[name] = _bounded(word, MAX_ID_CHARACTERS if name == "id" else MAX_WORD_CHARACTERS)
    function = _function(call.function) if call.function is not None else {}
    if function:
        shown["function"] = function
    uncounted = sum(len(word) for word in words.values() if word is not None)
    return AnswerPart({"tool_calls": [shown]}, _text(function), uncounted=uncounted)


def _function(function: SaidFunction) -> dict[str, str]:
    named = {} if function.name is None else {"name": _bounded(function.name)}
    return named if function.arguments is None else named | {"arguments": function.arguments}


def _text(function: dict[str, str]) -> str:
    return function.get("name", "") + function.get("arguments", "")


def _bounded(word: str, most: int = MAX_WORD_CHARACTERS) -> str:
    if len(word) > most:
        raise Garbage(f"a word of a tool call is longer than {most} characters")
    return word


def _annotations(data: bytes) -> list[Any]:
    if len(data) > MAX_ANNOTATION_BYTES:
        raise Garbage(f"its annotations are larger than {MAX_ANNOTATION_BYTES} bytes")
    decoded = msgspec.json.decode(data)
    if decoded is None:
        return []
    if not isinstance(decoded, list) or not all(isinstance(item, dict) for item in decoded):
        raise Garbage("its annotations are no list of objects")
    if _depth_is_above(decoded, MAX_DEPTH):
        raise Garbage(f"its annotations are nested deeper than {MAX_DEPTH}")
    return decoded


def _depth_is_above(value: Any, most: int) -> bool:
    if not isinstance(value, list | dict):
        return False
    inner = value if isinstance(value, list) else list(value.values())
    return most == 0 or any(_depth_is_above(item, most - 1) for item in inner)
