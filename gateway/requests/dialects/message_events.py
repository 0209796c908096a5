"""Answers of Anthropic's Messages API: the message, the events of its stream, the error object.

message_start; for each block content_block_start, its deltas, content_block_stop; then message_delta with
`stop_reason` and usage, and message_stop. https://docs.anthropic.com/en/api/messages-streaming
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
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


def error_object(error: ApiError, *, is_late: bool = False) -> dict[str, Any]:
    """With our `code`, `param` and details, as in OpenAI's shape. `is_late`: within a stream."""
    payload: dict[str, Any] = error.late_payload() if is_late else error.payload()
    plain = "api_error" if error.status >= 500 else "invalid_request_error"
    payload["error"] |= {"type": ERROR_TYPES.get(error.status, plain)}
    return {"type": "error"} | payload


class MessageWriter:
    """Of one message. Blocks follow each other: a call ends when its arguments are whole and something else
    comes; what comes before is held back to the end."""

    def __init__(self, call: Call, left_out: Sequence[LeftOut]) -> None:
        self._call = call
        self._left_out = left_out
        self._blocks = 0
        self._open = ""
        """The type of the block that is open; empty: none."""
        self._frame = b""
        """Of its deltas, up to their text."""
        self._live = -1
        """The call that was begun last, by its server's index."""
        self._arguments: list[str] = []
        """Of that call, so far."""
        self._begun = set[int]()
        """Calls whose block was begun."""
        self._held_calls: dict[int, list[Part]] = {}
        self._held_texts: list[tuple[str, str]] = []
        self._ended: SequenceEnded | None = None

    def write(self, event: Event, refusal: ApiError | None = None) -> bytes:
        match event:
            case InLine():
                return b""
            case Silence():
                return PING
            case Begun():
                usage = _usage(self._call, self._call.input_tokens, 0, 0)
                start = {"type": "message_start", "message": _message(self._call, [], usage)}
                return server_sent(start, "message_start")
            case SequenceOutput(text=text, parts=parts):
                found = [self._part(part) for part in parts]
                return b"".join([*found, self._text("text", text)]) if text else b"".join(found)
            case SequenceEnded():
                self._ended = event
                return self._close_all()
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
            "delta": _ending(self._ended.finish, self._ended.outcome, has_calls=bool(self._begun)),
            "usage": usage_of(self._call, account),
        }
        return server_sent(delta | fairgate, "message_delta") + server_sent(
            {"type": "message_stop"}, "message_stop"
        )

    # ------------------------------------------------------------ text and thinking

    def _text(self, block_type: str, text: str) -> bytes:
        if self._open == CALL and (self._held_texts or not self._is_call_whole()):
            self._held_texts.append((block_type, text))
            return b""
        opened = b""
        if self._open != block_type:
            opened = self._close() + self._start(_BLOCKS[block_type], block_type)
        return b"".join([opened, self._frame, encode_line(text), b"}}\n\n"])

    def _part(self, part: Part) -> bytes:
        found = b""
        if thinking := part.get("reasoning_content") or part.get("reasoning"):
            found += self._text("thinking", thinking)
        if text := part.get("refusal") or part.get("content"):
            found += self._text("text", text)
        for fragment in part.get("tool_calls", ()):
            found += self._fragment(fragment["index"], fragment)
        if function := part.get("function_call"):
            found += self._fragment(0, {"function": function})
        return found

    # ------------------------------------------------------------ calls

    def _fragment(self, index: int, fragment: Part) -> bytes:
        if index == self._live and self._open == CALL:
            return self._add_arguments([fragment])
        if index in self._begun:
            return b""  # its arguments were whole
        if index in self._held_calls or (self._open == CALL and not self._is_call_whole()):
            self._held_calls.setdefault(index, []).append(fragment)
            return b""
        return self._close() + self._start_call([fragment], index)

    def _is_call_whole(self) -> bool:
        with suppress(msgspec.DecodeError):
            msgspec.json.decode("".join(self._arguments))
            return True
        return False

    def _start_call(self, fragments: Sequence[Part], index: int) -> bytes:
        (call,) = message("", [{"tool_calls": [{**each, "index": 0} for each in fragments]}])["tool_calls"]
        block = _call_block(self._call, index, call["id"], call["function"]["name"], {})
        self._live, self._arguments = index, []
        self._begun.add(index)
        return self._start(block, CALL) + self._add_arguments(fragments)

    def _add_arguments(self, fragments: Sequence[Part]) -> bytes:
        said = "".join([each.get("function", {}).get("arguments") or "" for each in fragments])
        self._arguments.append(said)
        return b"".join([self._frame, encode_line(said), b"}}\n\n"]) if said else b""

    # ------------------------------------------------------------ blocks

    def _start(self, block: dict[str, Any], block_type: str) -> bytes:
        self._open = block_type
        place = {"index": self._blocks}
        delta_type, field = _DELTAS[block_type]
        start = encode({"type": "content_block_delta"} | place | {"delta": {"type": delta_type}})
        self._frame = b'event: content_block_delta\ndata: %s,"%s":' % (start[:-2], field.encode())
        event = {"type": "content_block_start"} | place | {"content_block": block}
        return server_sent(event, "content_block_start")

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        self._blocks += 1
        event = {"type": "content_block_stop", "index": self._blocks - 1}
        return server_sent(event, "content_block_stop")

    def _close_all(self) -> bytes:
        found = [self._close()]
        found += [self._text(block_type, text) for block_type, text in self._held_texts]
        for index, fragments in sorted(self._held_calls.items()):
            found += [self._close(), self._start_call(fragments, index)]
        return b"".join([*found, self._close()])


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


def whole_message(
    call: Call, choice: Choice, account: Account, left_out: Sequence[LeftOut]
) -> dict[str, Any]:
    """The body of an answer that is not streamed. A call whose arguments were cut has an empty input."""
    said = choice.message()
    content: list[dict[str, Any]] = []
    if thinking := said.get("reasoning_content") or said.get("reasoning"):
        content.append(_BLOCKS["thinking"] | {"thinking": thinking})
    if text := said["content"] or said["refusal"]:
        content.append(_BLOCKS["text"] | {"text": text})
    calls = said.get("tool_calls") or [
        {"id": "", "function": function} for function in filter(None, [said.get("function_call")])
    ]
    for index, each in enumerate(calls):
        given: object = {}
        with suppress(msgspec.DecodeError):
            given = msgspec.json.decode(each["function"]["arguments"] or "{}")
        given = given if isinstance(given, dict) else {}
        content.append(_call_block(call, index, each["id"], each["function"]["name"], given))
    body = _message(call, content, usage_of(call, account))
    body |= _ending(choice.finish or "", choice.outcome, has_calls=bool(calls))
    return body | {"fairgate": with_notes(account, left_out)}


def _call_block(call: Call, index: int, call_id: str, name: str, given: object) -> dict[str, Any]:
    call_id = call_id or shown_id(call.request_id, "toolu_") + f"_{index}"
    return {"type": CALL, "id": call_id, "name": name, "input": given}


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


def usage_of(call: Call, account: Account) -> dict[str, Any]:
    """Tokens as charged; those from the prompt cache are counted apart."""
    charged = account.charged
    return _usage(call, charged.input_tokens, account.cached_tokens, charged.output_tokens)


def _usage(call: Call, input_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, Any]:
    cached_tokens = min(cached_tokens, input_tokens)
    return {
        "input_tokens": input_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
        "service_tier": TIER_WORDS[call.tier],
    }
