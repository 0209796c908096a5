"""OpenAI's Responses API, without storage: its request, and its response object.

A request is answered as the chat completion that it translates to. Tools that only OpenAI runs, and freeform
ones, are left out with a note in the answer (`fairgate.left_out`) where the model may do without them.
https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway import errors
from gateway.domain.account import Account
from gateway.domain.call import Call
from gateway.domain.ids import RESPONSE_ID_PREFIX, shown_id
from gateway.domain.tiers import TIER_NAMES
from gateway.errors import ApiError
from gateway.requests.dialects.dialect import Asked, Choice
from gateway.requests.dialects.response_events import ResponseWriter
from gateway.requests.dialects.response_items import STATELESS, InputItem, InputItems
from gateway.requests.dialects.tools import set_tools
from gateway.requests.dialects.translation import Translation
from gateway.requests.schemas import ChatCompletionRequest, ChatMessage, decode_listed

LOGPROBS = "message.output_text.logprobs"
"""In `include`."""
REFUSED = {
    "previous_response_id": STATELESS,
    "conversation": STATELESS,
    "prompt": "No prompts are stored here: send its text in 'instructions' or 'input', and leave it out.",
    "background": "Nothing is stored here: send 'stream': true, or wait for the answer; with an"
    " 'Idempotency-Key' it can be fetched again.",
}
"""Fields that need a store, and the way out."""


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    """How much to reason. The other fields have no effect: the answer has the reasoning itself."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Format and length of the text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/responses`."""

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    """Names the session that the call belongs to, after the header `session-id`."""
    truncation: str | None = None
    # Vendor extras, as in a chat.
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    # Known to OpenAI, without effect here.
    store: bool | None = None
    """The answer says false."""
    stream_options: Any = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    max_tool_calls: int | None = None
    client_metadata: Any = None
    context_management: Any = None
    # Known to OpenAI; refused when set.
    background: bool | None = None
    conversation: Any = None
    previous_response_id: str | None = None
    prompt: Any = None


def read(body: bytes, most_items: int) -> Asked:
    """Raises `ApiError`."""
    request = decode_listed(body, ResponsesRequest, "input", most_items)
    for name, way_out in REFUSED.items():
        if getattr(request, name):
            raise errors.unsupported_parameter(name, f"'{name}' is not supported. {way_out}")
    options, reasoning = request.text or TextOptions(), request.reasoning or Reasoning()
    chat = ChatCompletionRequest(
        model=request.model,
        messages=[],
        max_completion_tokens=request.max_output_tokens,
        reasoning_effort=reasoning.effort,
        verbosity=options.verbosity,
        **{name: getattr(request, name) for name in _SAME},
    )
    translation = Translation(chat, dict(_NAMES), [])
    conversation = InputItems(translation)
    if request.instructions is not None:
        conversation.add(ChatMessage("system", request.instructions), "instructions", "instructions")
    if isinstance(request.input, str):
        conversation.add(ChatMessage("user", request.input), "input", "input")
    else:
        for index, item in enumerate(request.input):
            conversation.add_item(item, f"input[{index}]")
    tools, is_parallel = request.tools or (), request.parallel_tool_calls
    set_tools(translation, tools, request.tool_choice, is_parallel, schema_field="parameters")
    if (form := options.format) is not None and form.get("type") == "json_schema":
        described = {key: value for key, value in form.items() if key != "type" and value is not None}
        chat.response_format = {"type": "json_schema", "json_schema": described}
    else:
        chat.response_format = form
    if request.top_logprobs or LOGPROBS in (request.include or ()):
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs or 0
    if request.truncation not in (None, "disabled", "auto"):
        raise errors.bad_request("Invalid 'truncation': it must be 'auto' or 'disabled'.", "truncation")
    if request.truncation == "auto":
        translation.leave_out(
            "truncation", "No item is dropped: an input that is longer than the context is refused."
        )
    return Asked(chat, translation.parse, Responses(request, translation))


_SAME = (
    "temperature", "top_p", "stream", "metadata", "user", "safety_identifier", "service_tier",
    "prompt_cache_key", "seed", "top_k", "min_p", "repetition_penalty", "ignore_eos",
)  # fmt: skip
"""Fields that mean the same in a chat completion."""
_NAMES = {
    "logprobs": "include",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "verbosity": "text.verbosity",
}
"""Fields of a chat completion that are named differently here."""
_SHOWN = (
    "instructions", "max_output_tokens", "max_tool_calls", "prompt_cache_key", "safety_identifier",
    "temperature", "top_p", "user",
)  # fmt: skip
"""Fields that the answer repeats."""


class Responses(msgspec.Struct):
    """Says the answer to one request."""

    request: ResponsesRequest
    translation: Translation

    def writer(self, call: Call) -> ResponseWriter:
        return ResponseWriter(call, self._shown(call), self.translation)

    def whole(self, call: Call, choices: Sequence[Choice], account: Account) -> dict[str, Any]:
        return self.writer(call).whole(choices[0], account)

    def refused(self, error: ApiError, request_id: str) -> bytes:
        return self.translation.in_own_words(error).body()

    def _shown(self, call: Call) -> dict[str, Any]:
        """The response object in progress."""
        asked = self.request
        options, reasoning = asked.text or TextOptions(), asked.reasoning or Reasoning()
        return {name: getattr(asked, name) for name in _SHOWN} | {
            "id": shown_id(call.request_id, RESPONSE_ID_PREFIX),
            "object": "response",
            "created_at": call.created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "metadata": asked.metadata or {},
            "model": call.model,
            "output": [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "service_tier": TIER_NAMES[call.tier],
            "store": False,
            "text": {"format": options.format or {"type": "text"}, "verbosity": options.verbosity},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [tool for tool in asked.tools or () if tool.get("type") == "function"],
            "top_logprobs": asked.top_logprobs or 0,
            "truncation": "disabled",
            "usage": None,
        }
