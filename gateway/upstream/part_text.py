"""The text of an answer's parts: which words of a tool call count, and whether its JSON is complete. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from gateway.upstream.base import Part

# ---------------------------------------------------------------- the generated text of a call

LONGEST_OPEN_ESCAPE = len(r"\ud83d\ude0")
_STRUCTURE = re.compile(r'[\s{}\[\]",:\\]+')
_ESCAPES = re.compile(r"(?:\\u[0-9a-fA-F]{4})+")
_OPEN_ESCAPE = re.compile(r"(?:\\u[dD][89abAB][0-9a-fA-F]{2})?(?:\\(?:u[0-9a-fA-F]{0,3})?)?$")
"""A partial escape, or the first half of a surrogate pair."""


class CallText:
    """The words of tool calls, as tokens are counted.

    Servers re-serialise calls as JSON, with blanks, quotes and escapes of their own. So only words count,
    each escape as its character: never more tokens than the model wrote.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._ended_blank = False
        """The last fragment ended with marks: those of the next one belong to them."""

    def words(self, fragment: str) -> str:
        text = self._rest + fragment
        end = len(text) - LONGEST_OPEN_ESCAPE if len(text) > LONGEST_OPEN_ESCAPE else 0
        escape = _OPEN_ESCAPE.search(text, end)
        self._rest = "" if escape is None else escape.group()
        text = text[: len(text) - len(self._rest)]
        words = _STRUCTURE.sub(" ", _ESCAPES.sub(_unescaped, text))
        if self._ended_blank:
            words = words.removeprefix(" ")
        self._ended_blank = words.endswith(" ") if words else self._ended_blank
        return words


def _unescaped(found: re.Match[str]) -> str:
    text: str = json.loads(f'"{found.group()}"')
    return text.encode(errors="replace").decode()  # half a pair is no character


# ---------------------------------------------------------------- incomplete JSON

_SIGNS = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)


class JsonEnd:
    """Whether a JSON text that comes in fragments is complete."""

    __slots__ = ("_depth", "_in_escape", "_in_string", "has_begun")

    def __init__(self) -> None:
        self.has_begun = False
        self._depth = 0
        self._in_string = False
        self._in_escape = False

    @property
    def is_reached(self) -> bool:
        return self.has_begun and self._depth <= 0 and not self._in_string

    def feed(self, fragment: str) -> None:
        if not fragment:
            return
        self.has_begun = self.has_begun or not fragment.isspace()
        start = 1 if self._in_escape else 0
        self._in_escape = False
        for match in _SIGNS.finditer(fragment, start):
            sign = match.group()
            if sign[0] == "\\":
                self._in_escape = self._in_string and len(sign) == 1
            elif sign == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if sign in "{[" else -1


class Completeness:
    """Whether the tool calls of one answer, and a text that is to be JSON, are complete."""

    def __init__(self, wanted: str) -> None:
        """`wanted`: `tool_calls` or `json`, if the answer must be that; else empty."""
        self._calls: dict[int, JsonEnd] = {}
        """By index; -1 is a legacy `function_call`."""
        self._must_call = wanted == "tool_calls"
        self._text = JsonEnd() if wanted == "json" else None

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def feed(self, parts: Sequence[Part], text: str) -> None:
        for part in parts:
            for call in part.get("tool_calls", ()):
                self._feed_call(call["index"], call.get("function", {}))
            if "function_call" in part:
                self._feed_call(-1, part["function_call"])
        if self._text is not None:
            self._text.feed(text)

    def _feed_call(self, index: int, function: dict[str, str]) -> None:
        end = self._calls.get(index)
        if end is None:
            end = self._calls[index] = JsonEnd()
        end.feed(function.get("arguments", ""))

    def lacking(self, finish: str) -> str:
        """What is incomplete after our finish reason: `tool_calls`, `json` or nothing (empty)."""
        was_cut = finish != "stop"
        # Without arguments a call is complete, unless they were still to come.
        if any(not end.is_reached and (was_cut or end.has_begun) for end in self._calls.values()):
            return "tool_calls"
        if self._must_call and not self._calls and was_cut:
            return "tool_calls"
        if self._text is not None and not self._calls and was_cut and not self._text.is_reached:
            return "json"
        return ""
