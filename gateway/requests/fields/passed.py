"""Takes from a request what its server is passed as it is, and says what that needs of the server. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from gateway import errors
from gateway.requests.fields.bounds import require_bounded
from gateway.requests.fields.tools import format_needs, tool_fields
from gateway.requests.passed_fields import CHAT_FIELDS, KIND_FIELD_NAMES, TEXT_FIELDS
from gateway.requests.schemas import ChatCompletionRequest, CompletionRequest, Sampling
from gateway.upstream.capabilities import Capability, need_of_field
from gateway.upstream.openai.server_kinds import (
    PROMPT_FIELDS,
    TEMPLATE_ARGUMENTS_REFUSED,
    is_idle,
    taken_of,
)

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of `reasoning_effort`; SGLang also takes numbers from 0 to 0.99."""
MAX_WORD_CHARACTERS = 64
_CHAT_NAMES = (*CHAT_FIELDS, *KIND_FIELD_NAMES)
_TEXT_NAMES = (*TEXT_FIELDS, *KIND_FIELD_NAMES)
_chat_values, _text_values = attrgetter(*_CHAT_NAMES), attrgetter(*_TEXT_NAMES)


@dataclass(slots=True)
class Passed:
    """The part of a request that only its server understands."""

    fields: dict[str, Any]
    needs: dict[str, str]
    """What it needs of a server, and the field that needs it, the field to blame first."""

    @property
    def changes_prompt(self) -> bool:
        """The server renders another prompt than the one that is counted here."""
        return not PROMPT_FIELDS.isdisjoint(self.fields)

    def leave_out_idle(self, offers: Collection[str]) -> None:
        """Removes what asks for nothing and no server takes. `offers`: the needs that servers meet."""
        self.fields = taken_of(self.fields, offers)


def passed_of_chat(request: ChatCompletionRequest) -> Passed:
    """Of a chat completion. Raises `ApiError`."""
    _require_nothing_else(request)
    fields, needs = tool_fields(request)
    effort, said_in = request.reasoning_effort, "reasoning_effort"
    own_reasoning = request.reasoning
    if effort is None and request.reasoning is not None and request.reasoning.keys() == {"effort"}:
        effort, said_in = request.reasoning["effort"], "reasoning"
        own_reasoning = None
    if effort is not None:
        fields["reasoning_effort"] = _effort(effort, said_in)
        if effort != "none":
            needs[Capability.REASONING] = said_in
    if request.verbosity is not None:
        fields["verbosity"] = _word(request.verbosity, "verbosity")
        if not is_idle("verbosity", request.verbosity):
            needs[need_of_field("verbosity")] = "verbosity"
    if request.chat_template_kwargs is not None:
        _require_template_arguments(request.chat_template_kwargs)
    said = _said(_CHAT_NAMES, _chat_values(request))
    if own_reasoning is None:
        said.pop("reasoning", None)
    return _with_common(request, said, fields, needs)


def passed_of_text(request: CompletionRequest) -> Passed:
    """Of a text completion. Raises `ApiError`."""
    said = _said(_TEXT_NAMES, _text_values(request))
    return _with_common(request, said, {}, {})


def _said(names: tuple[str, ...], values: tuple[Any, ...]) -> dict[str, Any]:
    """The fields that a request has: of some fifty for the most part none."""
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


def _with_common(
    request: Sampling, of_kind: Mapping[str, Any], fields: dict[str, Any], needs: dict[str, str]
) -> Passed:
    """`of_kind`: the request's fields for particular kinds of servers."""
    format_need = format_needs(request.response_format)
    if format_need:
        fields["response_format"] = request.response_format
        needs |= format_need
    for name, value in of_kind.items():
        fields[name] = value
        if not is_idle(name, value):
            needs[need_of_field(name)] = name
    for name, value in fields.items():
        require_bounded(name, value)
    needs[Capability.TEXT] = "model"
    return Passed(fields, needs)


def _require_nothing_else(request: ChatCompletionRequest) -> None:
    """Raises `ApiError` for what OpenAI knows and no server is passed."""
    if request.functions or request.function_call not in (None, "none", "auto"):
        name = "functions" if request.functions else "function_call"
        raise errors.unsupported_parameter(
            name, f"'{name}' is not supported; use 'tools' and 'tool_choice', which replace it."
        )
    if request.modalities is not None and request.modalities != ["text"]:
        raise errors.unsupported_parameter("modalities", "Only the modality 'text' is supported.")
    for name in ("audio", "prediction", "web_search_options"):
        if getattr(request, name) is not None:
            raise errors.unsupported_parameter(
                name, f"'{name}' is not supported: what it adds cannot be metered. Leave it out."
            )


def _effort(effort: object, field: str) -> str | float:
    if isinstance(effort, float | int) and 0 <= effort < 1:
        return effort
    if isinstance(effort, str) and effort in EFFORTS:
        return effort
    raise errors.bad_request(
        f"Invalid '{field}': it must be one of {', '.join(EFFORTS)}, or, for SGLang, a number from"
        " 0 to below 1.",
        field,
    )


def _word(text: str, name: str) -> str:
    if len(text) > MAX_WORD_CHARACTERS:
        raise errors.bad_request(
            f"Invalid '{name}': it has {len(text)} characters; the most is {MAX_WORD_CHARACTERS}.", name
        )
    return text


def _require_template_arguments(arguments: dict[str, Any]) -> None:
    for name in arguments:
        if name in TEMPLATE_ARGUMENTS_REFUSED:
            raise errors.unsupported_parameter(
                "chat_template_kwargs",
                f"'chat_template_kwargs' may not hold '{name}': it is no variable of the model's template: it"
                " says how the server renders it. Leave it out.",
            )
