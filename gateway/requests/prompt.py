"""Renders and tokenises prompts exactly, with the model's own files, without torch or transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokenizers import Encoding, Tokenizer

from engine.grammar.forms import form_of, read_json
from engine.grammar.source import special_tokens
from gateway.requests.chat_template import ChatTemplate, PromptRefused, TokenizerMissing
from gateway.requests.client_text import (
    Altered,
    Change,
    Placed,
    Placeholders,
    ToolArguments,
    for_template,
    map_json,
    map_texts,
)
from gateway.requests.fields.own_answer import PLAIN_FORM, OwnForm
from gateway.requests.special_tokens import SpecialTokens
from gateway.requests.token_bytes import longest_token_bytes

Fits = Callable[[int, bool], None]
"""Called with a lower bound of a prompt's tokens by its bytes, then (True) with their number; may raise."""


__all__ = ["EstimatedRenderer", "PromptRefused", "PromptRenderer", "TokenizerMissing"]

SpecialTokensInText = Literal["text", "refuse", "allow"]
"""The setting `gateway.special_tokens_in_text`."""
Messages = Sequence[dict[str, Any]]
_WORD = re.compile(r"[A-Za-z_$][\w$]*", re.ASCII)


class ChatInput(NamedTuple):
    """What a chat template writes."""

    messages: Messages
    tools: Messages = ()

    def map(self, change: Change) -> ChatInput:
        """A copy with each text of the client changed. Raises `PromptRefused`."""
        try:
            return ChatInput(
                [map_texts(each, f"messages[{index}]", change) for index, each in enumerate(self.messages)],
                [map_json(each, f"tools[{index}]", change) for index, each in enumerate(self.tools)],
            )
        except RecursionError:
            raise PromptRefused("arguments of tool calls are nested too deeply") from None


Render = Callable[[ChatInput], str]


class PromptRenderer:
    """Of one model directory. Thread-safe: it holds no state between calls."""

    def __init__(
        self,
        model_dir: Path,
        special_tokens_in_text: SpecialTokensInText = "text",
        *,
        is_foreign: bool = False,
    ) -> None:
        """`is_foreign`: another server renders and tokenises; here prompts are only counted, and refused if
        clients' special tokens are. Raises `TokenizerMissing`."""
        tokenizer_file = model_dir / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise TokenizerMissing(
                f"{model_dir} has no tokenizer.json. Save the model's fast tokenizer there:"
                " AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # the Rust side raises bare Exception
            raise TokenizerMissing(f"{tokenizer_file} cannot be read as a tokenizer: {error}") from None
        described = read_json(tokenizer_file)
        self._longest_token_bytes = longest_token_bytes(described)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = ChatTemplate.of_model(model_dir)
        self._is_foreign = is_foreign
        self.own_form = PLAIN_FORM
        if not is_foreign:
            self.own_form = OwnForm(form_of(model_dir), special_tokens(described.get("added_tokens", ())))
        self._refuses = special_tokens_in_text == "refuse"
        self._special: SpecialTokens | None = None
        if self._refuses or (special_tokens_in_text == "text" and not is_foreign):
            self._special = SpecialTokens(
                self._tokenizer, self._template.source if self._template is not None else ""
            )

    @property
    def has_chat_template(self) -> bool:
        """Without one only `/v1/completions` works."""
        return self._template is not None

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def template_reads(self, variable: str) -> bool:
        """Such as `tools`, of this model's chat template."""
        return self._template is not None and self._template.reads(variable)

    def render(self, messages: Messages, tools: Messages = ()) -> str:
        """The conversation with the opening of an answer. Raises `PromptRefused`."""
        return self._render(ChatInput(self._for_template(messages), tools))

    def chat_tokens(
        self,
        messages: Messages,
        fits: Fits | None = None,
        *,
        is_opened: bool = True,
        tools: Messages = (),
        effort: str | None = None,
    ) -> list[int]:
        """Token ids of a conversation, with an answer's opening if `is_opened`. Only the template writes
        special tokens, unless clients may: texts that spell one are encoded apart. Raises `PromptRefused`."""
        said = ChatInput(self._for_template(messages), tools)
        render = partial(self._render, is_opened=is_opened, effort=effort)
        if not self._is_foreign:
            self._require_calls(said, render)
        rendered = render(said)
        if not all(tool["function"]["name"] in rendered for tool in tools):
            raise PromptRefused("this model's chat template has no place for tools", "tools")
        self._may_fit(rendered, fits)
        placed = self._spelling(said, rendered, render) if self._special is not None else []
        if not placed:
            return self._encode([rendered], fits)
        return self._encode_apart(rendered, placed, fits)

    def text_tokens(self, text: str, fits: Fits | None = None, *, has_frame: bool = True) -> list[int]:
        """Token ids of a plain prompt; `has_frame`: with added special tokens. Raises `PromptRefused`."""
        self._may_fit(text, fits)
        if self._special is None or not (spelled := self._special.spelled(text)):
            return self._encode([text], fits, add_special_tokens=has_frame)
        if self._refuses:
            raise _spells(spelled[0], "prompt")
        (found,) = self._special.encode_as_text([text])
        if fits is not None:
            fits(len(found), True)
        self._plain_ids(found, "prompt")
        return list((self._tokenizer.post_process(found) if has_frame else found).ids)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in ids]

    def text_of(self, ids: Sequence[int]) -> str:
        """Including special tokens."""
        text: str = self._tokenizer.decode_batch([ids], skip_special_tokens=False)[0]
        return text

    def count(self, text: str) -> int:
        """Without special tokens."""
        return len(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def _encode(self, pieces: list[str], fits: Fits | None, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids in order; special tokens are added to each piece. `encode_batch_fast` releases the GIL;
        taking the ids out needs it, so `fits` may refuse them first."""
        found = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=add_special_tokens)
        if fits is not None:
            fits(sum(map(len, found)), True)
        return (
            found[0].ids if len(found) == 1 else list(chain.from_iterable(encoding.ids for encoding in found))
        )

    def _may_fit(self, text: str, fits: Fits | None) -> None:
        if fits is not None and self._longest_token_bytes is not None:
            fits(-(-num_bytes(text) // self._longest_token_bytes), False)

    def _for_template(self, messages: Messages) -> list[dict[str, Any]]:
        try:
            return [
                for_template(message, f"messages[{index}]", needs_objects=not self._is_foreign)
                for index, message in enumerate(messages)
            ]
        except ValueError as error:
            raise PromptRefused("it must be a JSON object, written as text", str(error)) from None

    def _render(self, said: ChatInput, *, is_opened: bool = True, effort: str | None = None) -> str:
        if self._template is None:
            raise PromptRefused("this model has no chat template; use /v1/completions")
        return self._template.render(said.messages, is_opened=is_opened, tools=said.tools, effort=effort)

    def _require_calls(self, said: ChatInput, render: Render) -> None:
        """Raises `PromptRefused` if the template leaves out tool calls or their results."""
        messages = said.messages
        if not any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
            return
        marks: dict[str, str] = {}
        placeholders = Placeholders()

        def mark(field: str) -> str:
            found = placeholders.put(field, "")
            marks[found] = field
            return found

        probe: list[dict[str, Any]] = []
        for number, message in enumerate(messages):
            changed = dict(message)
            if message["role"] == "tool":
                changed["content"] = mark(f"messages[{number}]")
            if message.get("tool_calls"):
                changed["tool_calls"] = []
            for index, call in enumerate(message.get("tool_calls") or ()):
                field = f"messages[{number}].tool_calls[{index}]"
                function = {"name": mark(field), "arguments": ToolArguments({mark(field): ""})}
                changed["tool_calls"].append({**call, "function": function})
            probe.append(changed)
        rendered = render(said._replace(messages=probe))
        for found, field in marks.items():
            if found not in rendered:
                raise PromptRefused(
                    "the model's chat template does not write tool calls, or what tools answered: leave them"
                    " out, or say it in the 'content' of an assistant or a user",
                    field,
                )

    def _spelling(self, said: ChatInput, rendered: str, render: Render) -> list[Placed]:
        """The client's texts that spell special tokens. Raises `PromptRefused`."""
        special = self._special
        assert special is not None
        suspects: set[str] = set()
        firm = ""  # the first field that spells one that the tokenizer marks as special

        def look(field: str, text: str) -> str:
            nonlocal firm
            spelled = special.spelled(text)
            if spelled and self._refuses:
                raise _spells(spelled[0], field)
            if not firm and not special.markup.issuperset(spelled):
                firm = field
            if spelled or special.may_take_part(text):
                suspects.add(text)
            return text

        said.map(look)
        placed: list[Placed] = []
        if suspects:
            placeholders = Placeholders()
            marked = render(
                said.map(lambda field, text: placeholders.put(field, text) if text in suspects else text)
            )
            try:
                placed = placeholders.places(marked, rendered)
            except Altered as altered:
                if firm or special.spelled(marked) != special.spelled(rendered):
                    raise _altered(altered.field) from None
            spans = special.spans(rendered) if placed else []
            placed = [
                text
                for text in placed
                if any(begin < text.end and text.begin < end for begin, end, _ in spans)
            ]
            if placed and self._refuses:
                raise _spells(spans[0][2], placed[0].field)
        if not placed and self._template is not None and self._template.rewrites:
            all_texts = Placeholders()

            def put(field: str, text: str) -> str:
                # Templates read the words of a schema, such as its types.
                is_word = field.startswith("tools") and _WORD.fullmatch(text)
                return text if is_word else all_texts.put(field, text)

            marked = render(said.map(put))
            if special.spelled(marked) != special.spelled(rendered):
                raise PromptRefused("the model's chat template makes a special token of what these texts say")
        return placed

    def _encode_apart(self, rendered: str, placed: Sequence[Placed], fits: Fits | None) -> list[int]:
        assert self._special is not None
        ends = [0, *(text.end for text in placed)]
        begins = [*(text.begin for text in placed), len(rendered)]
        between = [rendered[end:begin] for end, begin in zip(ends, begins, strict=True)]
        around = self._tokenizer.encode_batch_fast(between, add_special_tokens=False)
        apart = self._special.encode_as_text([rendered[text.begin : text.end] for text in placed])
        if fits is not None:
            fits(sum(map(len, around)) + sum(map(len, apart)), True)
        ids = list(around[0].ids)
        for spot, text, after in zip(placed, apart, around[1:], strict=True):
            ids += self._plain_ids(text, spot.field)
            ids += after.ids
        return ids

    def _plain_ids(self, text: Encoding, field: str) -> list[int]:
        """The ids of a text without special tokens. Raises `PromptRefused`."""
        if self._special is not None and self._special.has_special(text):
            raise PromptRefused(
                "it spells a special token of this model, which its tokenizer cannot read as plain text:"
                " leave it out",
                field,
            )
        return list(text.ids)


class EstimatedRenderer:
    """For unknown tokenizers: counts bytes, rather too many tokens; equal beginnings get equal ids."""

    BYTES_PER_TOKEN = 2
    """A token of text is rarely shorter: English has about four, Chinese and code three."""
    LONGEST_TOKEN_BYTES = 128
    """Bytes of the longest token in known vocabularies (blanks): a text of more per token is too long."""
    MESSAGE_TOKENS = 8
    """What a chat template adds to a message, and once to all of them."""
    has_chat_template = True
    vocabulary = 2**31 - 1
    own_form = PLAIN_FORM

    def chat_tokens(self, messages: Messages, fits: Fits | None = None, **_: Any) -> list[int]:
        texts: list[list[str]] = []
        for message in messages:
            parts = [f"{message.get('role')}{message.get('name') or ''}", str(message.get("content") or "")]
            if message.get("tool_calls"):
                parts.append(json.dumps(message["tool_calls"], ensure_ascii=False))
            texts.append(parts)
        if fits is not None:
            overhead = self.MESSAGE_TOKENS * (1 + len(messages))
            fits(sum(map(num_bytes, chain.from_iterable(texts))) // self.LONGEST_TOKEN_BYTES, False)
            fits(overhead + sum(map(self._count, chain.from_iterable(texts))), True)
        ids = [0] * self.MESSAGE_TOKENS
        for parts in texts:
            ids += [0] * self.MESSAGE_TOKENS
            for part in parts:
                ids += self.text_tokens(part)
        return ids

    def text_tokens(self, text: str, fits: Fits | None = None) -> list[int]:
        if fits is not None:
            fits(num_bytes(text) // self.LONGEST_TOKEN_BYTES, False)
            fits(self._count(text), True)
        data = text.encode("utf-8", "surrogatepass")
        return list(memoryview(data + b"\0" * (len(data) % 2)).cast("H"))

    def text_of(self, ids: Sequence[int]) -> str:
        return ""

    def _count(self, text: str) -> int:
        return -(-num_bytes(text) // self.BYTES_PER_TOKEN)


def num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _spells(token: str, field: str) -> PromptRefused:
    return PromptRefused(
        f"it spells the special token {token!r} of this model, which this server does not take in text:"
        " leave it out",
        field,
    )


def _altered(field: str) -> PromptRefused:
    return PromptRefused(
        "it spells a special token of this model, or a part of one, and the model's chat template does not"
        " write this text as it is (it trims, cuts or converts it), so that the token cannot be told from the"
        " template's own: leave it out, or white space at the ends of the text",
        field,
    )
