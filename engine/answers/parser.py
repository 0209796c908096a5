"""An answer's text to its parts, by a response template of transformers' format. Needs transformers.

Its own streaming parser keeps the whole answer, raises on a malformed call and ends a call at a mark inside
of a string; this one does not. What comes out depends on the text alone, not on how it was cut: a replay
gives the same parts and ids. White space beside a mark is dropped, as are the marks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import load_response_template

from engine.answers.call_reader import CallReader, call_of
from engine.core.detokenizer import DetokenizerFactory, IncrementalText
from engine.grammar.forms import THOUGHT_FIELDS, AnswerForm
from engine.messages import Submit

Item = dict[str, Any]
"""A delta object of OpenAI's chat stream: plain text is `content`."""
MAX_CALLS = 128
"""Of one answer; more are text."""
MAX_HELD_CHARACTERS = 1024
"""Of text that may begin a mark, and of white space that is dropped if a mark follows."""
KEPT_CHARACTERS = 32
"""Before the present position: marks may depend on what is before them."""
PREFIX_TOKENS = 256
"""Last tokens of a prompt that are looked at for what they open."""


class AnswerForms:
    """The form of the engine's model. Made once; opens the parser of each answer that asks for parts."""

    def __init__(self, form: AnswerForm, texts: DetokenizerFactory) -> None:
        """Raises ValueError if the model's own `response_template` makes no sense."""
        self.form = form
        self.fields = load_response_template(form.response_template).fields
        self.marks = texts.special_tokens(form.spells)
        """Special tokens that are shown in the text of answers with parts, as they are marks; by id."""
        self._texts = texts

    def open(self, submit: Submit) -> AnswerParser | None:
        """None: its answer has no parts."""
        if not submit.parts:
            return None
        prompt = "".join(map(self._texts.token_text, submit.prompt_token_ids[-PREFIX_TOKENS:]))
        return AnswerParser(self, submit.parts, self.form.said_before(prompt), submit.sequence_id)

    def text(self, submit: Submit) -> IncrementalText:
        """The text that a parser reads, with the marks of parts."""
        return self._texts.open(submit.prompt_token_ids, submit.sampling, self.marks)


class AnswerParser:
    """Parts of one answer. What is not among `parts` stays in the text as the model wrote it."""

    def __init__(self, forms: AnswerForms, parts: Iterable[str], prefix: str, sequence_id: str) -> None:
        """`prefix`: the beginning of the answer that is part of the prompt."""
        self._parts = frozenset(parts)
        self._sequence_id = sequence_id
        self._form = forms.form.calls
        self._fields = forms.fields
        self._text = ""
        self._position = 0
        self._field: str | None = None
        self._kind = "content"
        """Of the open field: one of `parts`, or else text."""
        self._call: list[str] = []
        """What was written of the open call, its mark first."""
        self._captures: dict[str, str] = {}
        self._reader: CallReader | None = None
        self._is_named = False
        self._is_ended = False
        """Of the open call, only the mark of its end is missing."""
        self._calls = 0
        self._space = ""
        self._spoken = "content"
        """Kind of the text before `_space`."""
        self._is_after_mark = False
        self._items: list[Item] = []
        self.feed(prefix)
        self._text = self._text[: self._position]

    def feed(self, text: str) -> list[Item]:
        """The parts that are certain by now, in their order."""
        self._items = []
        for start in range(0, len(text), MAX_HELD_CHARACTERS):
            self._text += text[start : start + MAX_HELD_CHARACTERS]
            self._run()
            if len(self._text) - self._position > MAX_HELD_CHARACTERS:
                self._write(self._text[self._position :])
                self._position = len(self._text)
            dropped = max(0, self._position - KEPT_CHARACTERS)
            self._text, self._position = self._text[dropped:], self._position - dropped
        return self._items

    def finish(self) -> list[Item]:
        """Ends the answer: what was held. A call that was cut before its name was known is text."""
        self._items = []
        self._run(is_end=True)
        if self._kind == "tool_calls":
            self._end_call("")
        if self._space:
            self._items.append({self._spoken: self._space})
        return self._items

    def _run(self, *, is_end: bool = False) -> None:
        while True:
            if self._reader is not None:
                self._read_call(self._reader)
            if self._reader is not None:
                return
            field, match, safe = self._next_mark(is_end)
            self._write(self._text[self._position : safe])
            self._position = safe
            if match is None:
                return
            self._position = match.end()
            if self._field is None:
                self._open(field, match)
            else:
                self._close(match.group())

    def _next_mark(self, is_end: bool) -> tuple[str, Any, int]:
        """The next mark that is certain, and where the text ends that is before it and before all that may
        become one."""
        found, first, safe = "", None, len(self._text)
        for name, field in self._fields.items():
            pattern, literals = field.open_re, field.open_literals
            if self._field is not None:
                pattern, literals = field.close_re if name == self._field else None, field.close_literals
            match = pattern and pattern.search(self._text, self._position, partial=not is_end)
            if not match:
                continue
            may_grow = match.partial or (literals is None and match.end() == len(self._text))
            if may_grow and not is_end:
                safe = min(safe, match.start())
            elif first is None or match.start() < first.start():
                found, first = name, match
        if first is None or first.start() >= safe:
            return "", None, safe
        return found, first, first.start()

    def _open(self, field: str, match: Any) -> None:
        self._field, self._kind = field, "reasoning_content" if field in THOUGHT_FIELDS else field
        if self._kind not in self._parts or self._calls >= MAX_CALLS:
            self._kind = "content"
            self._say("content", match.group())
        elif self._kind == "reasoning_content":
            self._cross_mark()
        else:
            self._call, self._is_named = [match.group()], False
            self._captures = {key: value for key, value in match.groupdict().items() if value is not None}
            if self._form is not None and not self._form.as_list:
                self._reader = CallReader(self._form)

    def _write(self, text: str) -> None:
        if self._kind == "tool_calls":
            self._call.append(text)
        else:
            self._say(self._kind, text)

    def _close(self, mark: str) -> None:
        if self._kind == "tool_calls":
            self._end_call(mark)
        elif self._kind == "reasoning_content" or self._is_ended:
            self._cross_mark()
        else:
            self._say("content", mark)
        self._field, self._kind, self._is_ended = None, "content", False

    # ------------------------------------------------------------ text and thoughts

    def _say(self, kind: str, text: str) -> None:
        if self._is_after_mark:
            text = text.lstrip()
        if not text:
            return
        self._is_after_mark, self._spoken = False, kind
        text = self._space + text
        shown = text.rstrip()
        shown = text[: max(len(shown), len(text) - MAX_HELD_CHARACTERS)]
        self._space = text[len(shown) :]
        if shown and self._items and kind in self._items[-1]:
            self._items[-1][kind] += shown
        elif shown:
            self._items.append({kind: shown})

    def _cross_mark(self) -> None:
        self._space, self._is_after_mark = "", True

    # ------------------------------------------------------------ calls

    def _read_call(self, reader: CallReader) -> None:
        self._position += reader.read(self._text[self._position :])
        if reader.name and not self._is_named:
            self._name_call(reader.name)
            self._is_named = True
        if arguments := reader.take_arguments():
            self._add_arguments(arguments)
        if reader.is_done:
            self._is_ended = self._end_call("") and self._fields["tool_calls"].close_re is not None
            self._field = "tool_calls" if self._is_ended else None

    def _end_call(self, mark: str) -> bool:
        """Adds what is left of the open call, or its text if it is none. Whether it is one."""
        reader, self._reader, self._kind = self._reader, None, "content"
        if reader is not None and reader.is_streamed:
            return True
        body = "".join(self._call[1:]) if reader is None else reader.body
        try:
            if reader is not None:
                calls = [reader.whole()]
            else:
                field = self._fields["tool_calls"]
                if field.close_re is not None and not mark and field.content != "json":
                    raise ValueError("a call that was cut, in a form whose end would not show that")
                value = process_field(body, field, self._captures)
                values = [each["function"] for each in (value if isinstance(value, list) else [value])]
                calls = [call_of(each["name"], each.get("arguments")) for each in values]
        except Exception:  # what a model wrote, by a template that came with it
            calls = []
        if not calls and not self._is_named:
            self._say("content", self._call[0] + body + mark)
        for name, arguments in calls[: MAX_CALLS - self._calls + self._is_named]:
            if not self._is_named:
                self._name_call(name)
            self._add_arguments(arguments)
        return bool(calls) or self._is_named

    def _name_call(self, name: str) -> None:
        self._cross_mark()
        digest = hashlib.sha256(f"{self._sequence_id}:{self._calls}".encode()).hexdigest()
        # Mistral's chat templates take ids of nine letters and digits only.
        call_id = digest[:9] if self._form is not None and self._form.as_list else f"call_{digest[:24]}"
        function = {"name": name, "arguments": ""}
        call = {"index": self._calls, "id": call_id, "type": "function", "function": function}
        self._items.append({"tool_calls": [call]})
        self._calls += 1

    def _add_arguments(self, text: str) -> None:
        self._items.append({"tool_calls": [{"index": self._calls - 1, "function": {"arguments": text}}]})
