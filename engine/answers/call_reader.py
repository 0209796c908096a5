"""Reads a tool call in JSON while it is written: its name, then the raw text of its arguments."""

from __future__ import annotations

import json
import re

from engine.grammar.forms import CallForm

MAX_NAME_CHARACTERS = 256


class CallReader:
    """One JSON object. The mark of the call's end counts only outside of strings."""

    def __init__(self, form: CallForm) -> None:
        self.body = ""
        """What was read; of arguments that are streamed, what was not taken."""
        self.name = ""
        self.is_streamed = False
        self.is_done = False
        """The object has ended, or is no call."""
        self._form = form
        self._stop = form.end.strip()[:1]
        colon, comma = (rf"\s{{0,9}}{mark}\s{{0,9}}" for mark in ":,")  # bounded: tried at each read
        other = rf'(?:"(?:id|type)"{colon}"[^"\\]{{0,64}}"{comma}){{0,2}}'
        name = rf'"{form.name_key}"{colon}("[^"\\\x00-\x1f]{{1,{MAX_NAME_CHARACTERS}}}")'
        self._heads = [
            rf"\s{{0,9}}\{{\s{{0,9}}{other}{name}",
            rf'{comma}"{form.arguments_key}"{colon}(?=\{{)',
        ]
        self._head_end = 0
        self._depth = 0
        self._in_string = self._is_escaped = self._has_key = False
        self._inner_end: int | None = None
        """Of the first nested value, in `body`."""

    def read(self, text: str) -> int:
        """How many characters belong to the object."""
        end = len(text)
        for position, character in enumerate(text):
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
                continue
            if character == self._stop:
                self.is_done, end = True, position
                break
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            if self._depth == 1 and character in "}]" and self._inner_end is None:
                self._inner_end = len(self.body) + position + 1
            is_over = self._depth < 1 and not character.isspace()
            if is_over or (character == ":" and not self._may_begin(text[:position])):
                self.is_done, end = True, position + 1
                break
        self.body += text[:end]
        self._read_heads()
        return end

    def _may_begin(self, text: str) -> bool:
        """Whether a call's first key is one of its form's: an answer in JSON is not held until it ends."""
        is_first, self._has_key = not self._has_key, True
        known = f"id|type|{self._form.name_key}|{self._form.arguments_key}"
        return not is_first or re.fullmatch(rf'\s*\{{\s*"({known})"\s*', self.body + text) is not None

    def _read_heads(self) -> None:
        while self._heads and (match := re.compile(self._heads[0]).match(self.body, self._head_end)):
            if not self.name:
                self.name, self._heads, self._head_end = json.loads(match[1]), self._heads[1:], match.end()
            else:
                self.is_streamed, self._heads, self.body = True, [], self.body[match.end() :]
                self._inner_end = None if self._inner_end is None else self._inner_end - match.end()

    def take_arguments(self) -> str:
        """What was read of the arguments since the last time, if they are streamed."""
        if not self.is_streamed:
            return ""
        fresh, self.body = self.body[: self._inner_end], ""
        self._inner_end = None if self._inner_end is None else 0
        return fresh

    def whole(self) -> tuple[str, str]:
        """Of an object that is complete. Raises an exception of any type if it is no call."""
        value = json.loads(self.body)
        return call_of(value[self._form.name_key], value.get(self._form.arguments_key))


def call_of(name: object, arguments: object) -> tuple[str, str]:
    """As the API has them: arguments are JSON in a string. Raises ValueError."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise ValueError("a call without a name that can be one")
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
