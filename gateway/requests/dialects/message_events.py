"""Answers of Anthropic's Messages API: the message, the events of its stream, the error object.

message_start; for each block content_block_start, its deltas, content_block_stop; then message_delta with
`stop_reason` and usage, and message_stop. https://docs.anthropic.com/en/api/messages-streaming
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from engine.messages import SequenceOutcome
from gateway.domain.account import Account
from gateway.domain.call import Call
from gateway.domain.ids import MESSAGE_ID_PREFIX, shown_id
from gateway.errors import ApiError
from gateway.requests.dialects.chat import FINISH_REASONS
from gateway.requests.dialects.chat_message import message
from gateway.requests.dialects.dialect import Choice, encode, encode_line, server_sent
from gateway.requests.dialects.translation import LeftOut, with_notes
from gateway.requests.run import Begun, Closed, Event, InLine, SequenceEnded, SequenceOutput, Silence
from gateway.upstream.base import CountedOutcome, Part
from tenants.types import Tier

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
TIER_WORDS = {Tier.INTERACTIVE: "priority", Tier.STANDARD: "standard", Tier.BATCH: "batch"}
"""Of usage; requests may have them too."""
PING = server_sent({"type": "ping"}, "ping")
CALL = "tool_use"
_BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    CALL: ("input_json_delta", "partial_json"),
}
"""Of a block: the type of its deltas, and the field with their text."""


def error_object(error: ApiError, *, is_late: bool = False) -> dict[str, Any]:
    """With our `code`, `param` and details, as in OpenAI's shape. `is_late`: within a stream."""
    payload: dict[str, Any] = error.late_payload() if is_late else error.payload()
    plain = "api_error" if error.status >= 500 else "invalid_request_error"
    payload["error"] |= {"type": ERROR_TYPES.get(error.status, plain)}
    return {"type": "error"} | payload


class MessageWriter:
    """Of one message. Blocks follow each other: what comes before the arguments of a call are whole is held
    back to the end."""

    def __init__(self, call: Call, left_out: Sequence[LeftOut]) -> None:
        self._call = call
        self._left_out = left_out
        self._blocks = 0
        self._open = ""
        """The type of the block that is open; empty: none."""
        self._frame = b""
        """Of its deltas, up to their text."""
        self._calls: list[int] = []
        """Calls whose block was begun, by their server's index."""
        self._arguments: list[str] = []
        """Of the last of them, so far."""
        self._held: list[Part] = []
        self._ended: SequenceEnded | None = None

    def write(self, event: Event, refusal: ApiError | None = None) -> bytes:
        match event:
            case InLine():
                return b""
            case Silence():
                return PING
            case Begun():
                usage = _usage(self._call, self._call.input_tokens)
                start = {"type": "message_start", "message": _message(self._call, [], usage)}
                return server_sent(start, "message_start")
            case SequenceOutput(text=text, parts=parts):
                return b"".join([*map(self._part, parts), self._text("text", text)])
            case SequenceEnded():
                self._ended = event
                held = message("".join(part.get("content", "") for part in self._held), self._held)
                found = [self._close()]
                for block, text in _blocks(self._call, held, len(self._calls)):
                    found += [self._start(block), self._delta(text), self._close()]
                return b"".join(found)
            case Closed(account=account):
                return self._end(account, refusal)

    def _end(self, account: Account, refusal: ApiError | None) -> bytes:
        fairgate = {"fairgate": with_notes(account, self._left_out)}
        if refusal is not None:
            error = error_object(refusal, is_late=True) | {"request_id": self._call.request_id}
            return server_sent(error | fairgate, "error")
        assert self._ended is not None, "a complete request has an end"
        delta = {
            "type": "message_delta",
            "delta": _ending(self._ended.finish, self._ended.outcome, has_calls=bool(self._calls)),
            "usage": _charged(self._call, account),
        }
        return server_sent(delta | fairgate, "message_delta") + server_sent(
            {"type": "message_stop"}, "message_stop"
        )

    def _part(self, part: Part) -> bytes:
        thinking = part.get("reasoning_content") or part.get("reasoning") or ""
        found = [self._text("thinking", thinking)]
        found += [self._text("text", part.get("refusal") or part.get("content") or "")]
        found += [self._fragment(fragment) for fragment in part.get("tool_calls", ())]
        return b"".join(found)

    def _text(self, block_type: str, text: str) -> bytes:
        if not text:
            return b""
        if self._is_held():
            self._held.append({"content" if block_type == "text" else "reasoning_content": text})
            return b""
        opened = b""
        if self._open != block_type:
            opened = self._close() + self._start(_BLOCKS[block_type])
        return opened + self._delta(text)

    def _fragment(self, fragment: Part) -> bytes:
        index, function = fragment["index"], fragment.get("function", {})
        arguments = function.get("arguments") or ""
        opened = b""
        if self._open != CALL or index != self._calls[-1]:
            if index in self._calls:
                return b""  # its arguments were whole
            if self._is_held():
                self._held.append({"tool_calls": [fragment]})
                return b""
            block = _call_block(self._call, index, fragment.get("id", ""), function.get("name", ""))
            opened = self._close() + self._start(block)
            self._calls.append(index)
            self._arguments = []
        self._arguments.append(arguments)
        return opened + self._delta(arguments)

    def _is_held(self) -> bool:
        """Whether what comes now must wait for the arguments of a call."""
        return bool(self._held) or (self._open == CALL and _decoded("".join(self._arguments)) is None)

    def _start(self, block: Mapping[str, Any]) -> bytes:
        self._open = block["type"]
        place = {"index": self._blocks}
        delta_type, field = _DELTAS[self._open]
        start = encode({"type": "content_block_delta"} | place | {"delta": {"type": delta_type}})
        self._frame = b'event: content_block_delta\ndata: %s,"%s":' % (start[:-2], field.encode())
        return server_sent(
            {"type": "content_block_start"} | place | {"content_block": block}, "content_block_start"
        )

    def _delta(self, text: str) -> bytes:
        return b"".join([self._frame, encode_line(text), b"}}\n\n"]) if text else b""

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        self._blocks += 1
        event = {"type": "content_block_stop", "index": self._blocks - 1}
        return server_sent(event, "content_block_stop")


def whole_message(
    call: Call, choice: Choice, account: Account, left_out: Sequence[LeftOut]
) -> dict[str, Any]:
    """The body of an answer that is not streamed. A call whose arguments were cut has an empty input."""
    content: list[dict[str, Any]] = []
    for block, text in _blocks(call, choice.message()):
        kind = block["type"]
        content.append(block | ({"input": _decoded(text) or {}} if kind == CALL else {kind: text}))
    body = _message(call, content, _charged(call, account))
    has_calls = any(block["type"] == CALL for block in content)
    body |= _ending(choice.finish or "", choice.outcome, has_calls=has_calls)
    return body | {"fairgate": with_notes(account, left_out)}


def _blocks(
    call: Call, said: Mapping[str, Any], calls_before: int = 0
) -> Iterator[tuple[dict[str, Any], str]]:
    """Of a chat's message: each as it begins, and its text, of a call the arguments."""
    if thinking := said.get("reasoning_content") or said.get("reasoning"):
        yield _BLOCKS["thinking"], thinking
    if text := said["content"] or said["refusal"]:
        yield _BLOCKS["text"], text
    for index, each in enumerate(said.get("tool_calls", ()), calls_before):
        function = each["function"]
        yield _call_block(call, index, each["id"], function["name"]), function["arguments"]


def _decoded(arguments: str) -> dict[str, Any] | None:
    """None: they are not whole, or no object."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None


def _call_block(call: Call, index: int, call_id: str, name: str) -> dict[str, Any]:
    call_id = call_id or shown_id(call.request_id, "toolu_") + f"_{index}"
    return {"type": CALL, "id": call_id, "name": name, "input": {}}


def _message(call: Call, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": shown_id(call.request_id, MESSAGE_ID_PREFIX),
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _ending(finish: str, outcome: SequenceOutcome | None, *, has_calls: bool) -> dict[str, str | None]:
    word = "" if outcome is None else outcome.stop_string
    if isinstance(outcome, CountedOutcome):
        if outcome.finish_word == "content_filter":
            return {"stop_reason": "refusal", "stop_sequence": None}
        said = outcome.choice_fields.get("stop_reason") or outcome.choice_fields.get("matched_stop")
        word = said if isinstance(said, str) else ""
    if FINISH_REASONS.get(finish) == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if has_calls:
        return {"stop_reason": CALL, "stop_sequence": None}
    return {"stop_reason": "stop_sequence" if word else "end_turn", "stop_sequence": word or None}


def _charged(call: Call, account: Account) -> dict[str, Any]:
    charged = account.charged
    return _usage(call, charged.input_tokens, account.cached_tokens, charged.output_tokens)


def _usage(call: Call, input_tokens: int, cached_tokens: int = 0, output_tokens: int = 0) -> dict[str, Any]:
    """Tokens from the prompt cache are counted apart."""
    cached_tokens = min(cached_tokens, input_tokens)
    return {
        "input_tokens": input_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
        "service_tier": TIER_WORDS[call.tier],
    }
