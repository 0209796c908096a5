"""A dialect: how one API asks for an answer and is given it. All have the lifecycle of a chat completion.

`chat.py` is OpenAI's chat and text completions, `responses.py` OpenAI's Responses, `messages.py` Anthropic's
Messages. Each one's request becomes a `ChatCompletionRequest`, and each one's writer says the run's events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from engine.messages import SequenceOutcome, TokenLogprob
from gateway.domain.account import Account
from gateway.domain.call import Call
from gateway.errors import ApiError
from gateway.requests.dialects.chat_message import message
from gateway.requests.parse import RequestContext
from gateway.requests.run import Event
from gateway.requests.schemas import ChatCompletionRequest
from gateway.upstream.base import Part

encode = msgspec.json.encode

_LINE_BREAKS = [(character.encode(), b"\\u%04x" % ord(character)) for character in "\u0085\u2028\u2029"]
"""Line separators that JSON does not escape."""
KEEP_ALIVE = b": keep-alive\n\n"


def server_sent(value: object, name: str = "") -> bytes:
    """One server-sent event. `name` empty: without a name."""
    data = b"data: " + encode_line(value) + b"\n\n"
    return b"event: %s\n%s" % (name.encode(), data) if name else data


def encode_line(value: object) -> bytes:
    """JSON without Unicode's line breaks, at which clients (httpx's `iter_lines`) would cut an event."""
    data = encode(value)
    if data.isascii():
        return data
    for character, escape in _LINE_BREAKS:
        data = data.replace(character, escape)
    return data


@dataclass(slots=True)
class Choice:
    """One sequence's answer as it grows."""

    index: int
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    finish: str | None = None
    outcome: SequenceOutcome | None = None

    def add(self, text: str, logprobs: Sequence[TokenLogprob], parts: Sequence[Part] = ()) -> None:
        if text:
            self.text.append(text)
        self.parts.extend(parts)
        self.logprobs.extend(logprobs)

    def message(self) -> dict[str, Any]:
        """As a chat's answer has it."""
        return message("".join(self.text), self.parts)


class StreamWriter(Protocol):
    """Turns one run's events into server-sent events."""

    def write(self, event: Event, refusal: ApiError | None = None) -> bytes:
        """Empty if there is nothing to write yet. `refusal`: why a `Closed` run's answer is not complete."""
        ...


class Dialect(Protocol):
    """How an answer is said."""

    def writer(self, call: Call) -> StreamWriter: ...

    def whole(self, call: Call, choices: Sequence[Choice], account: Account) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...

    def refused(self, error: ApiError, request_id: str) -> bytes:
        """The body of a refusal."""
        ...


class Asked(NamedTuple):
    """A decoded request to answer a conversation."""

    chat: ChatCompletionRequest
    parse: Callable[[RequestContext], Call]
    """Raises `ApiError` in the dialect's own field names."""
    dialect: Dialect
