"""Finds the texts that a client wrote in the rendered conversation.

Only the template knows where a text goes. So the conversation is rendered a second time with an unguessable
placeholder for each text: if the renderings differ in nothing else, these are the places.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

Change = Callable[[str, str], str]
"""Gets a text's field (`messages[1].content`) and the text."""


class ToolArguments(dict[str, Any]):
    """Arguments of a tool call: an object that reads as JSON where a template writes it as text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


class Altered(Exception):
    """The template changes a text; `field` holds it."""

    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.field = field


class Placed(msgspec.Struct, frozen=True):
    field: str
    begin: int
    end: int


class Placeholders:
    def __init__(self) -> None:
        self._begin = f"Px{secrets.token_hex(12)}x"  # letters of both cases: what changes case alters it
        self._texts: list[tuple[str, str]] = []

    def put(self, field: str, text: str) -> str:
        self._texts.append((field, text))
        return f"{self._begin}{len(self._texts) - 1}Q"

    def places(self, marked: str, rendered: str) -> list[Placed]:
        """The texts' places in `rendered`; those that are left out are skipped. Raises `Altered`."""
        pieces = re.split(self._begin + r"(\d+)Q", marked)
        placed: list[Placed] = []
        position, last = 0, -1
        for index, piece in enumerate(pieces):
            is_text = index % 2 == 1
            if is_text:
                last = int(piece)
                piece = self._texts[last][1]
                written = json.dumps(piece, ensure_ascii=False)[1:-1]
                piece = written if rendered.startswith(written, position) else piece
            if not rendered.startswith(piece, position):
                raise Altered(self._altered(last, is_text, pieces))
            if is_text:
                placed.append(Placed(self._texts[last][0], position, position + len(piece)))
            position += len(piece)
        if position != len(rendered):
            raise Altered(self._altered(last, False, pieces))
        return placed

    def _altered(self, last: int, is_text: bool, pieces: Sequence[str]) -> str:
        """The most probably altered field: the text at hand, or the next whose placeholder is gone."""
        if not is_text:
            found = {int(number) for number in pieces[1::2]}
            gone = [number for number in range(last + 1, len(self._texts)) if number not in found]
            last = gone[0] if gone else last
        return self._texts[last][0]


def for_template(message: Mapping[str, Any], path: str, *, needs_objects: bool) -> dict[str, Any]:
    """For templates: tool arguments as objects; others stay text, or raise ValueError (`needs_objects`)."""
    if not message.get("tool_calls"):
        return dict(message)
    calls: list[dict[str, Any]] = []
    for index, call in enumerate(message["tool_calls"]):
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict):
            function = {**function, "arguments": ToolArguments(arguments)}
        elif needs_objects:
            raise ValueError(f"{path}.tool_calls[{index}].function.arguments")
        calls.append({**call, "function": function})
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def map_texts(message: Mapping[str, Any], path: str, change: Change) -> dict[str, Any]:
    """A copy of a message in template form with each client's text changed."""
    copy = dict(message)
    for name in ("content", "name", "tool_call_id"):
        if copy.get(name):
            copy[name] = change(f"{path}.{name}", copy[name])
    if copy.get("tool_calls"):
        copy["tool_calls"] = [
            _map_tool_call(call, f"{path}.tool_calls[{index}]", change)
            for index, call in enumerate(copy["tool_calls"])
        ]
    return copy


def _map_tool_call(call: Mapping[str, Any], path: str, change: Change) -> dict[str, Any]:
    function = call["function"]
    return {
        **call,
        "id": change(f"{path}.id", call["id"]),
        "function": {
            **function,
            "name": change(f"{path}.function.name", function["name"]),
            "arguments": map_json(function["arguments"], f"{path}.function.arguments", change),
        },
    }


def map_json(value: Any, field: str, change: Change) -> Any:
    """A copy of a JSON value with each text in it changed, names of objects too."""
    if isinstance(value, str):
        return change(field, value) if value else value
    if isinstance(value, list):
        return [map_json(item, field, change) for item in value]
    if isinstance(value, dict):
        changed = ((change(field, key) if key else key, item) for key, item in value.items())
        return type(value)({key: map_json(item, field, change) for key, item in changed})
    return value
