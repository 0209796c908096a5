"""How model families write thoughts and tool calls, and which of these forms a model directory has.

A form is data: a `response_template` in transformers' format. Where the model brings none, the marks in its
chat template say which form it was trained on. Torch-free: the gateway asks, too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

_LLAMA = "<|start_header_id|>assistant<|end_header_id|>\n\n"
_DEEPSEEK = "<\N{FULLWIDTH VERTICAL LINE}Assistant\N{FULLWIDTH VERTICAL LINE}>"
ANCHORS = ["<|im_start|>assistant\n", "<|assistant|>\n", "[/INST]", _LLAMA, _DEEPSEEK]
"""Openings of an answer in a prompt."""
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names of thoughts in models' own templates."""


class CallForm(msgspec.Struct, frozen=True):
    """A tool call in JSON: `begin`, an object with a name and arguments, `end`."""

    begin: str
    """Empty: an answer that is such an object is a call."""
    end: str
    name_key: str
    arguments_key: str
    between: str = "\n"
    """Joins several calls."""
    as_list: bool = False
    """All calls are one JSON list between one `begin` and one `end`."""


class AnswerForm(msgspec.Struct, frozen=True):
    """How a model writes what is not plain text."""

    response_template: dict[str, Any]
    """In transformers' format, version 1."""
    calls: CallForm | None = None
    """None: no calls, or not in JSON, so they cannot be forced."""
    thoughts: tuple[str, str] | None = None
    """Their begin and end marks."""

    @property
    def has_calls(self) -> bool:
        return "tool_calls" in self.response_template["fields"]

    def spells(self, mark: str) -> bool:
        """Whether a special token's text is among the marks of thoughts or calls."""
        fields = self.response_template["fields"].values()
        return any(mark in _spelling(each) for each in fields if {"open", "open_pattern"} & each.keys())

    def said_before(self, prompt_text: str) -> str:
        """The beginning of the answer that is part of the prompt, as an opened `<think>`."""
        anchors = self.response_template.get("start_anchor", [])
        literals = map(re.escape, [anchors] if isinstance(anchors, str) else anchors)
        pattern = self.response_template.get("start_anchor_pattern") or "|".join(literals)
        if openings := list(re.finditer(pattern, prompt_text, re.DOTALL)):
            return prompt_text[openings[-1].end() :].rstrip()
        begin = self.thoughts[0] if self.thoughts is not None else ""
        return begin if prompt_text.rstrip().endswith(begin) else ""

    def opens_thoughts(self, prompt_text: str) -> bool:
        """Whether an answer to this prompt begins inside of its thoughts."""
        if self.thoughts is None:
            return False
        said = self.said_before(prompt_text)
        return said.rfind(self.thoughts[0]) > said.rfind(self.thoughts[1])


def form_of(model_dir: Path) -> AnswerForm | None:
    """The form of a model directory; None: its answers are plain text as far as its files say."""
    config = read_json(model_dir / "tokenizer_config.json")
    return form_from(config.get("response_template"), template_source(config, model_dir) or "")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def template_source(config: dict[str, Any], model_dir: Path) -> str | None:
    """The chat template of a model directory, by its `tokenizer_config.json`; None: it has none."""
    own_file = model_dir / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates: the one called "default"
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def form_from(own: dict[str, Any] | None, source: str) -> AnswerForm | None:
    """`own`: the model's response template; `source`: its chat template."""
    calls, field = _calls(source)
    thoughts = next((pair for pair in THOUGHTS if pair[1] in source), None)
    if own and own.get("fields"):
        fields = own["fields"]
        named: dict[str, Any] = next((fields[name] for name in THOUGHT_FIELDS if name in fields), {})
        begin, end = named.get("open"), named.get("close")
        thoughts = (begin, end) if isinstance(begin, str) and isinstance(end, str) else None
        spelled = _spelling(fields.get("tool_calls"))
        is_same = calls is not None and calls.begin.strip() in spelled and '"content": "json"' in spelled
        return AnswerForm(own, calls if is_same else None, thoughts)
    fields = {"tool_calls": field} if field else {}
    if thoughts is not None:
        fields["reasoning_content"] = {"open": thoughts[0], "close": thoughts[1]}
    if not fields:
        return None
    template = {"start_anchor": ANCHORS, "fields": {**fields, "content": {}}}
    return AnswerForm(template, calls, thoughts)


def _spelling(field: object) -> str:
    """A field's marks as they are written, be they literals or patterns."""
    return json.dumps(field, ensure_ascii=False).replace("\\n", "\n").replace("\\", "")


def _calls(source: str) -> tuple[CallForm | None, dict[str, Any]]:
    """The form of calls by the marks in a chat template, and its field of a response template."""
    plain = source.replace("\\n", "\n").replace("\\", "")
    field: dict[str, Any] = {"content": "json", "transform": {"type": "function", "function": "{content}"}}
    if "<tool_call>" in plain and '"arguments"' in plain and "<function=" not in plain:  # Hermes, Qwen
        line = "\n" if "<tool_call>\n" in plain else ""
        field |= {"open": "<tool_call>", "close": "</tool_call>", "repeats": True}
        return CallForm(f"<tool_call>{line}", f"{line}</tool_call>", "name", "arguments"), field
    if "[TOOL_CALLS]" in plain and "[ARGS]" not in plain:  # Mistral, tokenizers of version 3 to 7
        function = {"name": "{name}", "arguments": "{arguments}"}
        field |= {"open": "[TOOL_CALLS]", "transform": {"function": function}, "transform_each": True}
        blank = " " if "[TOOL_CALLS] [" in plain else ""
        return CallForm(f"[TOOL_CALLS]{blank}", "", "name", "arguments", between=",", as_list=True), field
    if "<|python_tag|>" in plain or ('{"name": ' in plain and '"parameters"' in plain):  # Llama 3
        field["open_pattern"] = r"(?:(?:\A|(?<=</think>))\s*|<\|python_tag\|>\s*)(?=\{)"
        field["transform"] = {"function": {"name": "{content.name}", "arguments": "{content.parameters}"}}
        return CallForm("", "", "name", "parameters"), field
    return None, {}
