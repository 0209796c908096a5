"""Anthropic's Messages API: its request, and its refusals.

A request is answered as the chat completion that it translates to. Tools that only Anthropic runs are left
out with a note in the answer (`fairgate.left_out`) where the model may do without them.
https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from gateway import errors
from gateway.domain.account import Account
from gateway.domain.call import Call
from gateway.errors import ApiError
from gateway.requests.dialects.dialect import Asked, Choice, encode
from gateway.requests.dialects.message_blocks import Block, Message, Turns
from gateway.requests.dialects.message_events import MessageWriter, error_object, whole_message
from gateway.requests.dialects.tools import set_tools
from gateway.requests.dialects.translation import Translation
from gateway.requests.schemas import ChatCompletionRequest, decode_listed
from tenants.types import MAX_END_USER_CHARS

PATH = "/v1/messages"
THREADS_UNSUPPORTED = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Details by which Anthropic's SDK goes on without threads."""


class OutputConfig(msgspec.Struct):
    """How much to think, and the format of the text."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class Conversation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages/count_tokens`: what counts as input."""

    model: str
    messages: list[Message]
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    """The older name of `output_config.format`."""
    context_management: Any = None
    """Taken and left out."""
    # Taken, without effect here.
    cache_control: Any = None
    diagnostics: Any = None
    speed: str | None = None
    # Known to Anthropic; refused when set.
    container: Any = None
    mcp_servers: list[Any] | None = None
    thread: Any = None
    """A conversation that the server keeps."""


class MessagesRequest(Conversation, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    """Its `user_id` is the end user."""
    service_tier: str | None = None
    """`auto` and `standard_only`: the key's own; else as in a chat."""
    inference_geo: str | None = None
    """Taken, without effect here."""
    # Vendor extras, as in a chat.
    seed: int | None = None
    ignore_eos: bool | None = None


def read(body: bytes, most_messages: int) -> Asked:
    """Raises `ApiError`."""
    try:
        request = decode_listed(body, MessagesRequest, "messages", most_messages)
    except ApiError as error:
        if (error.code, error.param) == ("missing_required_parameter", "max_tokens"):
            error.message += " It is the most tokens that the answer may have: send, for example, 1024."
        raise
    translation = translated(request)
    chat, asked_tier = translation.chat, request.service_tier
    chat.max_tokens, chat.stream = request.max_tokens, request.stream
    chat.stop, chat.temperature, chat.top_p = request.stop_sequences, request.temperature, request.top_p
    chat.top_k, chat.seed, chat.ignore_eos = request.top_k, request.seed, request.ignore_eos
    chat.service_tier = None if asked_tier == "standard_only" else asked_tier
    user = (request.metadata or {}).get("user_id")
    if isinstance(user, str):
        chat.safety_identifier, chat.prompt_cache_key = _user_and_session(user)
    translation.names |= {"stop": "stop_sequences", "safety_identifier": "metadata.user_id"}
    return Asked(chat, translation.parse, Messages(translation))


def _user_and_session(user_id: str) -> tuple[str, str | None]:
    """The end user, of a long name a digest, and the session that Claude Code names with it: it is no part of
    the end user, whose limits go on."""
    user, session = user_id, None
    before, _, after = user_id.rpartition("_session_")
    if before.startswith("user_") and "_account_" in before:
        user, session = before, after
    with suppress(msgspec.DecodeError, RecursionError):
        named = msgspec.json.decode(user_id, type=dict[str, str])
        session = named.pop("session_id", None)
        user = encode(dict(sorted(named.items()))).decode()
    is_long = len(user) > MAX_END_USER_CHARS
    return (hashlib.sha256(user.encode()).hexdigest() if is_long else user), session


def read_count(body: bytes, most_messages: int) -> Asked:
    """A call that would have the same prompt. Raises `ApiError`."""
    translation = translated(decode_listed(body, Conversation, "messages", most_messages))
    translation.chat.max_tokens = 1
    return Asked(translation.chat, translation.parse, Messages(translation))


def translated(request: Conversation) -> Translation:
    """The chat completion with the same prompt. Raises `ApiError`."""
    for name, why in (
        ("container", "only tools that the client runs are"),
        ("mcp_servers", "only tools that the client runs are"),
        ("thread", "nothing is stored here. Send all messages"),
    ):
        if getattr(request, name):
            error = errors.unsupported_parameter(name, f"'{name}' is not supported: {why}. Leave it out.")
            error.details |= {"details": THREADS_UNSUPPORTED} if name == "thread" else {}
            raise error
    config = request.output_config or OutputConfig()
    form, form_field = config.format, "output_config.format"
    if form is None:
        form, form_field = request.output_format, "output_format"
    chat = ChatCompletionRequest(model=request.model, messages=[], reasoning_effort=config.effort)
    names = {"reasoning_effort": "output_config.effort"}
    names |= {"response_format": form_field, "response_format.json_schema": form_field}
    translation = Translation(chat, names, [])
    if form is not None:
        _set_format(chat, form, form_field)
    Turns(translation).add_all(request.system, request.messages)
    _set_tools(translation, request)
    if request.thinking == {"type": "disabled"}:
        chat.thinking = request.thinking
    elif request.thinking is not None and request.thinking.get("type") != "adaptive":
        translation.leave_out(
            "thinking", "How much it thinks is the model's own choice; see 'output_config.effort'."
        )
    if request.context_management:
        translation.leave_out(
            "context_management", "Nothing is removed from the conversation: the client may do so."
        )
    return translation


def _set_format(chat: ChatCompletionRequest, form: dict[str, Any], field: str) -> None:
    """Raises `ApiError`."""
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise errors.bad_request(
            f"Invalid '{field}': it must be {{'type': 'json_schema', 'schema': ...}}.", field
        )
    schema = {"name": "answer", "schema": form["schema"], "strict": True}
    chat.response_format = {"type": "json_schema", "json_schema": schema}


def _set_tools(translation: Translation, request: Conversation) -> None:
    """Raises `ApiError`."""
    flat: list[dict[str, Any]] = []
    for tool in request.tools or ():
        kind = tool.get("type") or "custom"
        schema = {"type": "function", "parameters": tool.get("input_schema") or {"type": "object"}}
        flat.append(tool | (schema if kind == "custom" else {}))
    asked = request.tool_choice or {}
    kind = asked.get("type")
    if kind not in (None, "auto", "none", "any", "tool"):
        raise errors.bad_request(
            "'tool_choice.type' must be 'auto', 'any', 'tool' or 'none'.", "tool_choice.type"
        )
    choice = {"type": "function", "name": asked.get("name")} if kind == "tool" else kind
    parallel = False if asked.get("disable_parallel_tool_use") else None
    set_tools(
        translation, flat, "required" if kind == "any" else choice, parallel, schema_field="input_schema"
    )


class Messages(msgspec.Struct):
    """Says the answer to one request."""

    translation: Translation

    def writer(self, call: Call) -> MessageWriter:
        return MessageWriter(call, self.translation.left_out)

    def whole(self, call: Call, choices: Sequence[Choice], account: Account) -> dict[str, Any]:
        return whole_message(call, choices[0], account, self.translation.left_out)

    def refused(self, error: ApiError, request_id: str) -> bytes:
        return refused(self.translation.in_own_words(error), request_id)


def refused(error: ApiError, request_id: str, path: str = PATH) -> bytes:
    """The body of a refusal; of a `path` of other APIs in OpenAI's shape."""
    if path != PATH and not path.startswith(f"{PATH}/"):
        return error.body()
    return encode(error_object(error) | {"request_id": request_id})
