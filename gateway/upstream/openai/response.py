"""Parses a server's answers, refusals and list of models.

Pure. Deviations of servers from OpenAI's API are handled only here.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from engine.messages import TokenLogprob

DONE = b"[DONE]"
MAX_MESSAGE_CHARACTERS = 300
FINISHES = {
    "stop": "stop",
    "length": "length",
    "content_filter": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "eos_token": "stop",
}
"""The server's finish reason to ours; any other (`abort`, `error`) is a failure."""


class Garbage(Exception):
    """The server sent something that is no part of an answer."""


class StreamError(Exception):
    """The server reports a failure in mid-answer."""


# ---------------------------------------------------------------- answers


class Usage(msgspec.Struct):
    """A server's own count."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Chunk(msgspec.Struct):
    """One event of a stream, or a whole answer."""

    text: str = ""
    hidden_bytes: int = 0
    """Generated text outside the answer (reasoning): it counts, and is not passed on."""
    logprobs: Sequence[TokenLogprob] = ()
    finish: str | None = None
    usage: Usage | None = None


class _Said(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct):
    delta: _Said | None = None
    """Of a chat's stream."""
    message: _Said | None = None
    """Of a whole chat."""
    text: str | None = None
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_answers = msgspec.json.Decoder(_Answer)


def chunk(data: bytes) -> Chunk:
    """Decodes one event's data, or a whole answer, which differs only in one name. Raises `Garbage`, and
    `StreamError` for an error object."""
    try:
        found = _answers.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Garbage("what it sent is no part of a completion") from None
    if found.error is not None:
        raise StreamError(said(found.error))
    usage = None if found.usage is None else _usage(found.usage)
    if not found.choices:
        return Chunk(usage=usage)
    choice = found.choices[0]
    text, hidden = choice.text or "", 0
    words = choice.delta or choice.message
    if words is not None:
        text = words.content or words.refusal or ""
        if reasoning := words.reasoning_content or words.reasoning:
            hidden = len(reasoning.encode())
    logprobs: Sequence[TokenLogprob] = ()
    if choice.logprobs:
        try:
            logprobs = _logprobs(choice.logprobs)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise Garbage("its logprobs are not in OpenAI's shape") from None
    return Chunk(text, hidden, logprobs, choice.finish_reason, usage)


def finish_of(word: str) -> str:
    """Our finish reason. Raises `StreamError` for an answer that was given up."""
    finish = FINISHES.get(word)
    if finish is None:
        raise StreamError(f"it gave the answer up ({word[:40]!r})")
    return finish


def _usage(found: _Usage) -> Usage:
    cached = found.prompt_tokens_details.cached_tokens if found.prompt_tokens_details is not None else 0
    usage = Usage(found.prompt_tokens, found.completion_tokens or 0, cached or 0)
    if min(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) < 0:
        raise Garbage("its usage is negative")
    return usage


def _logprobs(found: dict[str, Any]) -> list[TokenLogprob]:
    """Token ids are 0: the API names tokens by their text."""
    if found.get("content") is not None:
        return [
            TokenLogprob(
                0,
                str(item["token"]),
                float(item["logprob"]),
                [(0, str(each["token"]), float(each["logprob"])) for each in item.get("top_logprobs") or []],
            )
            for item in found["content"]
        ]
    if not found.get("tokens"):
        return []
    tops = found.get("top_logprobs") or [{}] * len(found["tokens"])
    return [
        TokenLogprob(
            0,
            str(token),
            float(logprob),
            [(0, str(text), float(value)) for text, value in (top or {}).items()],
        )
        for token, logprob, top in zip(found["tokens"], found["token_logprobs"], tops, strict=True)
        if logprob is not None
    ]


# ---------------------------------------------------------------- refusals


class Meaning(StrEnum):
    """The meaning of a status for the request and for the server."""

    REFUSED = "refused"
    """This request will not run there, however often it is sent."""
    BUSY = "busy"
    """It is full: not now, and not its fault."""
    FAILED = "failed"
    """Its own fault; another replica may succeed."""
    OURS = "ours"
    """It rejects the gateway: a wrong key, a wrong path, a model that it does not have."""


def meaning(status: int) -> Meaning:
    """The meaning of a status other than 200."""
    if status in (400, 413, 422):
        return Meaning.REFUSED
    if status == 429:
        return Meaning.BUSY
    if status in (401, 403, 404, 405) or 300 <= status < 400:
        return Meaning.OURS
    return Meaning.FAILED


def refusal(data: bytes) -> tuple[str, str]:
    """Code and message of a body that refuses the request. The message is the server's own, cut: it concerns
    what this client sent."""
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "invalid_request", "the server that runs this model refuses the request"
    error = found.get("error", found) if isinstance(found, dict) else found
    message = said(error)
    code = error.get("code") if isinstance(error, dict) else None
    is_length = code == "context_length_exceeded" or "context length" in message.lower()
    return (
        "context_length_exceeded" if is_length else "invalid_request",
        message or "the server that runs this model refuses the request",
    )


def said(error: object) -> str:
    """The message of an error object, cut to a line."""
    message = error.get("message") if isinstance(error, dict) else error
    text = message if isinstance(message, str) else ""
    return " ".join(text.split())[:MAX_MESSAGE_CHARACTERS]


# ---------------------------------------------------------------- models


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    """vLLM, SGLang."""
    context_tokens: int | None = None
    """Fairgate."""
    context_length: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


def models(data: bytes) -> dict[str, int]:
    """Names of the models that a server lists, with their context in tokens, 0 where it does not say. Raises
    `Garbage`."""
    try:
        found = msgspec.json.decode(data, type=_Models)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Garbage("its list of models is not in OpenAI's shape") from None
    return {
        each.id: each.max_model_len or each.context_tokens or each.context_length or 0 for each in found.data
    }
