"""What our own engine's answer to a request may say, and which parts of it are no plain text. Pure.

A new schema takes up to a second of processor time: `checked_answers.py` keeps what is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from engine.grammar import source
from engine.grammar.forms import AnswerForm
from engine.grammar.refused import GrammarRefused
from engine.grammar.source import Built, ToolSchema
from engine.messages import Grammar
from gateway import errors
from gateway.upstream.capabilities import Capabilities, Capability
from gateway.upstream.openai.server_kinds import TOOL_FIELDS

STRUCTURED = ("json", "regex", "choice", "grammar")
"""Keys of `structured_outputs`; each has an older field of its own."""
GUIDED = tuple(f"guided_{name}" for name in STRUCTURED)
TEXT_FIELDS = ("response_format", "structured_outputs", *GUIDED)
NAMES = frozenset((*TEXT_FIELDS, *TOOL_FIELDS))
"""Fields that decide what an answer may say."""
MOST_NOTES = 8
MOST_REASON_CHARACTERS = 300
SCHEMA = "response_format.json_schema.schema"
_WAY_OUT = "Simplify it; or leave it out, describe the form in a message, and check the answer"


class OwnAnswer(msgspec.Struct, frozen=True):
    grammar: Grammar | None = None
    parts: tuple[str, ...] = ()
    not_enforced: tuple[str, ...] = ()
    """Field and reason."""


class OwnForm(msgspec.Struct, frozen=True):
    """How the model of our own engine answers chats."""

    answers: AnswerForm | None = None
    """None: in plain text."""
    special: Mapping[str, int] = {}
    """Its special tokens (`source.special_tokens`)."""


PLAIN_FORM = OwnForm()


def own_capabilities(form: OwnForm, reads: Callable[[str], bool]) -> Capabilities:
    """`reads`: whether the model's chat template reads a variable."""
    words = {Capability.TEXT, Capability.JSON_OBJECT, Capability.JSON_SCHEMA}
    if form.answers is not None and form.answers.has_calls and reads("tools"):
        words.add(Capability.TOOLS)
        if form.answers.calls is not None:
            words.add(Capability.FORCED_TOOLS)
    if reads("reasoning_effort"):
        words.add(Capability.REASONING)
    return Capabilities(frozenset(words), frozenset({"structured_outputs", *GUIDED}))


def template_tools(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tools as chat templates know them, without what else their client says of them."""
    found: list[dict[str, Any]] = []
    for tool in fields.get("tools", ()):
        said = tool["function"]
        function = {name: said[name] for name in ("name", "description") if said.get(name) is not None}
        function["parameters"] = said.get("parameters") or {"type": "object", "properties": {}}
        found.append({"type": "function", "function": function})
    return found


def own_answer(fields: Mapping[str, Any], form: OwnForm, *, is_open: bool) -> OwnAnswer:
    """`is_open`: the prompt ends within thoughts. Raises `ApiError`."""
    answers = form.answers
    thoughts = None if answers is None else answers.thoughts
    parts: tuple[str, ...] = () if thoughts is None else ("reasoning_content",)
    if "tools" in fields:
        parts += ("tool_calls",)
    try:
        text = _text(fields)
        path, built = _with_calls(fields, form, text) or text or ("", None)
        if built is None:
            return OwnAnswer(None, parts, _unforced(fields))
        if thoughts is not None:
            begin, end = thoughts
            built = source.after_thoughts(built, end, is_open=is_open, begin=begin, special=form.special)
    except GrammarRefused as refused:
        raise _refused(refused.where or "tools", refused.message) from None
    if reason := source.check(built.grammar):
        raise _refused(*_to_blame(fields, path, text, reason))
    notes = (note.partition("/") for note in built.not_enforced[:MOST_NOTES])
    said = ((text[0] if text and where == "#" else where, pointer) for where, _, pointer in notes)
    return OwnAnswer(built.grammar, parts, tuple(f"{where}: /{pointer}" for where, pointer in said))


def _refused(path: str, reason: str) -> errors.ApiError:
    said = " ".join(reason.split())[:MOST_REASON_CHARACTERS].removesuffix(".")
    return errors.bad_request(f"Invalid '{path}': {said}. {_WAY_OUT}.", path)


def _to_blame(
    fields: Mapping[str, Any], path: str, text: tuple[str, Built] | None, reason: str
) -> tuple[str, str]:
    """The field whose grammar alone is refused, and why."""
    if path != "tools":
        return path, reason
    for index, tool in enumerate(fields["tools"]):
        schema = tool["function"].get("parameters") or {}
        if why := source.check(source.of_schema(schema).grammar):
            return f"tools[{index}].function.parameters", why
    if text is not None and (why := source.check(text[1].grammar)):
        return text[0], why
    return path, reason


# ---------------------------------------------------------------- text


def _text(fields: Mapping[str, Any]) -> tuple[str, Built] | None:
    """The field that constrains the text, and how. Raises `ApiError`, `GrammarRefused`."""
    said = [name for name in TEXT_FIELDS if name in fields]
    if not said:
        return None
    name, value = said[0], fields[said[0]]
    if len(said) > 1:
        raise errors.bad_request(
            f"'{name}' and '{said[1]}' each say what the answer may be: send one of them.", said[1]
        )
    if name == "response_format":
        if value["type"] == "json_object":
            return name, source.of_any_json()
        return SCHEMA, source.of_schema(value["json_schema"].get("schema", {}), where=SCHEMA)
    if name == "structured_outputs":
        asked = [key for key, each in value.items() if each is not None]
        for key in asked:
            if key not in STRUCTURED:
                raise errors.unsupported_parameter(
                    f"{name}.{key}", f"Our own engine does not take '{name}.{key}': leave it out."
                )
        if len(asked) != 1:
            raise errors.bad_request(f"'{name}' must hold one of {', '.join(STRUCTURED)}.", name)
        name, value = f"{name}.{asked[0]}", value[asked[0]]
    try:
        return name, _built(name, value)
    except GrammarRefused as refused:
        raise _refused(name, refused.message) from None


def _built(path: str, value: Any) -> Built:
    kind = path.removeprefix("structured_outputs.").removeprefix("guided_")
    if kind == "json":
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            raise _refused(path, "it is no JSON") from None
        return source.of_schema(value, where=path)
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise errors.bad_request(f"'{path}' must be a list of texts.", path, code="invalid_type")
        return source.of_choice(value)
    if not isinstance(value, str):
        raise errors.bad_request(f"'{path}' must be a text.", path, code="invalid_type")
    return source.of_regex(value) if kind == "regex" else source.of_grammar(value)


# ---------------------------------------------------------------- calls


def _with_calls(
    fields: Mapping[str, Any], form: OwnForm, text: tuple[str, Built] | None
) -> tuple[str, Built] | None:
    """Calls of tools, or beside them a constrained text; None: nothing constrains them. Raises `ApiError`,
    `GrammarRefused`."""
    tools = fields.get("tools", ())
    must_call, names = _choice(fields.get("tool_choice", "auto"))
    several = fields.get("parallel_tool_calls") is not False and not (must_call and len(names or ()) == 1)
    allowed = [
        ToolSchema(
            function["name"],
            function.get("parameters"),
            bool(function.get("strict")),
            f"tools[{index}].function.parameters",
        )
        for index, function in enumerate(tool["function"] for tool in tools)
        if names is None or function["name"] in names
    ]
    is_free = not must_call and names is None and several and not any(tool.strict for tool in allowed)
    if not tools or (is_free and text is None):
        return None
    calls = None if form.answers is None else form.answers.calls
    if calls is None:
        if text is None:
            return None
        raise errors.bad_request(
            f"'{text[0]}' and 'tools' cannot be taken together: the form of this model's calls is not known"
            " here. Send one of them.",
            text[0].partition(".")[0],
        )
    built = source.of_tools(
        allowed, calls, must_call=must_call or text is not None, several=several, special=form.special
    )
    return "tools", built if must_call or text is None else source.either_of(built, text[1])


def _choice(choice: str | Mapping[str, Any]) -> tuple[bool, frozenset[str] | None]:
    """Whether a tool must be called, and the only ones that may be; None: all. `choice` is checked."""
    if isinstance(choice, str):
        return choice == "required", None
    if choice["type"] == "function":
        return True, frozenset({choice["function"]["name"]})
    allowed = choice["allowed_tools"]
    return allowed.get("mode") == "required", frozenset(tool["function"]["name"] for tool in allowed["tools"])


def _unforced(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """What says how tools may be called, where the model's form of calls cannot be constrained."""
    notes = [
        f"tools[{index}].function.strict: the form of this model's calls is not known here"
        for index, tool in enumerate(fields.get("tools", ()))
        if tool["function"].get("strict")
    ]
    return tuple(notes[:MOST_NOTES])
