"""JSON bodies of the API, and the errors for bodies that do not fit them.

Types only; `gateway/requests/parse.py` checks ranges and rules between fields, and
`tenants/admin/commands.py` has the bodies of admin acts. OpenAI fields without effect here are accepted;
unknown fields, and unsupported ones that would change the answer, are refused.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple, TypeVar

import msgspec

from gateway import errors
from gateway.requests.passed_fields import PassedFields
from gateway.upstream.openai.server_kinds import REFUSED_FIELDS

T = TypeVar("T", bound=msgspec.Struct)


class Range(NamedTuple):
    """Inclusive unless `is_above`: greater than `lowest`. None: no upper bound."""

    lowest: float
    highest: float | None
    is_above: bool = False


RANGES = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1),
    "top_k": Range(-1, None),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 10, is_above=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "logit_bias": Range(-100, 100),
}
"""Of sampling parameters; of `logit_bias` each value's."""


class MediaUrl(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """An image, a sound or a video: a data URL or an address."""

    url: str
    detail: str | None = None
    """Of an image."""


class InputAudio(msgspec.Struct, forbid_unknown_fields=True):
    """A sound."""

    data: str
    """In base64."""
    format: str


class InputFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A file by its content. An id of one is of its server's store, where tenants are not kept apart."""

    file_data: str
    filename: str | None = None


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """One part of a message: `text`, or what is none where the model takes it (`inputs/media.py`)."""

    type: str
    text: str | None = None
    image_url: MediaUrl | str | None = None
    """A text is the URL itself, as vLLM takes it, too."""
    audio_url: MediaUrl | str | None = None
    video_url: MediaUrl | str | None = None
    input_audio: InputAudio | None = None
    file: InputFile | None = None
    # Accepted and ignored: hints, names in a server's cache, other fields of assistants' parts.
    cache_control: Any = None
    uuid: Any = None
    refusal: Any = None
    thinking: Any = None
    signature: Any = None
    data: Any = None


class ToolFunction(msgspec.Struct, forbid_unknown_fields=True):
    """What an assistant called: a function and its arguments, a JSON object as text."""

    name: str
    arguments: str
    parsed_arguments: Any = None
    """What an SDK made of them, and sends back; not used."""


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """One call in an assistant's message; only functions can be taken."""

    id: str
    function: ToolFunction
    type: str = "function"
    index: int | None = None
    """Of a call that came as a stream, in SDKs that send it back; not used."""


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # What answers have and SDKs send back with them. Other servers get it: their template decides.
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    # Accepted and ignored.
    parsed: Any = None
    reasoning_details: Any = None
    cache_control: Any = None
    prefix: bool | None = None
    # Known to OpenAI; refused when set.
    audio: Any = None
    function_call: Any = None


def user_of(user: str | dict[str, Any] | None) -> str | None:
    found = user.get("id") if isinstance(user, dict) else user
    return found if isinstance(found, str) else None


class StreamOptions(msgspec.Struct):
    """`include_usage`: one last chunk with the usage."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(PassedFields, kw_only=True, forbid_unknown_fields=True):
    """Fields that both kinds of completion share."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    service_tier: str | None = None
    user: str | dict[str, Any] | None = None
    """An object is its `id`, where it has one."""
    safety_identifier: str | None = None
    """The end user, before `user`."""
    metadata: dict[str, str] | None = None
    cache_control: Any = None
    """Not used."""
    top_k: int | None = None
    """Vendor extra, as vLLM and SGLang have it; 0 or -1: off."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    """Vendor extra: go on to `max_tokens`."""

    @property
    def end_user(self) -> str | None:
        """The end user, unchecked; only length forecasts use it."""
        return user_of(self.user)


class ChatCompletionRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # Known to OpenAI, without effect here.
    store: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # Passed to servers that take them.
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | float | None = None
    verbosity: str | None = None
    # Of vLLM, SGLang, llama.cpp and services (`passed_fields.CHAT_FIELDS`), likewise.
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, str]] | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    reasoning: dict[str, Any] | None = None
    """OpenRouter; `{"effort": ...}` is `reasoning_effort`."""
    thinking: dict[str, Any] | None = None
    reasoning_format: str | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    # Known to OpenAI; refused when set to something with an effect.
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None

    @property
    def end_user(self) -> str | None:
        return self.safety_identifier or user_of(self.user)


class CompletionRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class QuoteRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/quotes`: like a completion, or only its size."""

    model: str
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    """With messages."""
    prompt: str | None = None
    prompt_tokens: int | None = None
    """Instead of a prompt: how long it would be."""
    max_tokens: int | None = None
    n: int | None = None
    service_tier: str | None = None
    """Only this tier; absent: every tier that the key may use."""


class TierChangeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/requests/{id}/tier`."""

    service_tier: str
    """As in a completion: OpenAI's words, or `interactive`, `standard`, `batch`."""
    preview: bool = False
    """Only return what it would cost."""


class PolicyChange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/policy`."""

    policy: str = ""
    options: dict[str, str | int | float] = {}
    """Those that are not named are the defaults."""
    template: str = ""
    """Of the options; those named above go before it."""
    from_settings: bool = False
    """Gives up what is stored: the settings of each gateway count again."""


_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`(?: - at `(?P<path>[^`]*)`)?")
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<name>[^`]*)`(?: - at `(?P<path>[^`]*)`)?")
_AT_PATH = re.compile(r"^(?P<what>.*?) - at `(?P<path>[^`]*)`$", re.DOTALL)
LEAST_MESSAGE_BYTES = len('{"role":"tool"},')
MAX_EXPLAINED_BYTES = 64 * 1024
"""A larger body is not parsed again to explain the error."""
_DECODERS: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {}


def decode(body: bytes, into: type[T]) -> T:
    """Raises `ApiError` (400) naming the parameter."""
    decoder = _DECODERS.get(into)
    if decoder is None:
        decoder = _DECODERS[into] = msgspec.json.Decoder(into)
    try:
        value: T = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _explain_broken(body, str(error)) from None
    except RecursionError:
        raise errors.broken_json(message="it is nested too deeply.") from None
    return value


def require_number(param: str, found: int, most: int) -> None:
    """Raises `ApiError` for too long a list."""
    if found > most:
        raise errors.bad_request(f"'{param}' holds {found} {param}; the most is {most}.", param)


_OUTLINES = {
    "messages": msgspec.defstruct("Outline", [("messages", list[msgspec.Raw], [])]),
    "input": msgspec.defstruct("Outline", [("input", str | list[msgspec.Raw], [])]),
}
"""Enough of a request to show the length of its list."""


def decode_listed(body: bytes, into: type[T], param: str, most: int) -> T:
    """Refuses more items in the list `param` than `most` before decoding any. Raises `ApiError`."""
    if len(body) > most * LEAST_MESSAGE_BYTES:
        found = getattr(decode(body, _OUTLINES[param]), param)
        require_number(param, len(found) if isinstance(found, list) else 0, most)
    return decode(body, into)


def _parameter(path: str) -> str:
    """`$.messages[0].content` -> `messages[0].content`."""
    return path.removeprefix("$").removeprefix(".").replace("[...]", "")


def _explain(message: str) -> errors.ApiError:
    if found := _UNKNOWN_FIELD.search(message):
        prefix = _parameter(found["path"] or "")
        if not prefix and (why := REFUSED_FIELDS.get(found["name"])) is not None:
            name = found["name"]
            return errors.unsupported_parameter(name, f"'{name}' is not taken: {why}. Leave it out.")
        return errors.unknown_parameter(f"{prefix}.{found['name']}" if prefix else found["name"])
    if found := _MISSING_FIELD.search(message):
        prefix = _parameter(found["path"] or "")
        name = f"{prefix}.{found['name']}" if prefix else found["name"]
        return errors.bad_request(
            f"Missing required parameter: '{name}'.", name, code="missing_required_parameter"
        )
    if found := _AT_PATH.match(message):
        name = _parameter(found["path"])
        return errors.bad_request(f"Invalid type for '{name}': {found['what']}.", name, code="invalid_type")
    return errors.bad_request(f"The request body must be a JSON object: {message}.", code="invalid_type")


def _explain_broken(body: bytes, message: str) -> errors.ApiError:
    """Names the field with NaN or Infinity, which Python's json writes and JSON does not have."""
    if len(body) > MAX_EXPLAINED_BYTES or not (b"NaN" in body or b"Infinity" in body):
        return errors.broken_json(message=message)

    def constant(name: str) -> float:
        return float(name.replace("Infinity", "inf"))

    try:
        value = json.loads(body, parse_constant=constant)
        name = _first_not_finite(value)
    except (ValueError, RecursionError):
        return errors.broken_json(message=message)
    if name is None:
        return errors.broken_json(message=message)
    return errors.bad_request(
        f"'{name}' must be a finite number: NaN and Infinity are not JSON.", name, code="invalid_value"
    )


def _first_not_finite(value: object) -> str | None:
    pending: list[tuple[str, object]] = [("", value)]
    while pending:
        path, item = pending.pop()
        if isinstance(item, float) and not math.isfinite(item):
            return path or "body"
        if isinstance(item, dict):
            pending += [(f"{path}.{key}" if path else str(key), inner) for key, inner in item.items()]
        elif isinstance(item, list):
            pending += [(f"{path}[{index}]", inner) for index, inner in enumerate(item)]
    return None
