"""Parses a server's answers, refusals and list of models. Pure.

Deviations of servers from OpenAI's API are handled only here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from ipaddress import ip_address
from typing import Any

import msgspec

from engine.messages import TokenLogprob
from gateway.upstream.answer_parts import AnswerPart, Garbage, Said, parts_after, parts_before
from gateway.upstream.openai.server_kinds import PASSED_FIELDS
from gateway.upstream.server_logprobs import logprobs_of

DONE = b"[DONE]"
MAX_MESSAGE_CHARACTERS = 300
MAX_STOP_CHARACTERS = 1024
"""Of a stop string that the server names."""
MAX_FINGERPRINT_CHARACTERS = 128
MAX_CONTEXT_TOKENS = 100_000_000
MAX_COUNT = 2**31 - 1
FINISHES = {
    "stop": "stop",
    "length": "length",
    "content_filter": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "eos_token": "stop",
    "repetition": "stop",
}
"""The server's finish reason to ours; any other is a `stop` that keeps the server's word."""
MAX_FINISH_CHARACTERS = 40
TELLING_FINISHES = frozenset({"content_filter", "tool_calls", "function_call", "repetition"})


class StreamError(Exception):
    """The server reports a failure in mid-answer."""


# ---------------------------------------------------------------- answers


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class Chunk(msgspec.Struct):
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()
    finish: str | None = None
    usage: Usage | None = None
    before: Sequence[AnswerPart] = ()
    after: Sequence[AnswerPart] = ()
    choice_fields: dict[str, Any] = {}
    """Further fields: `stop_reason`, `matched_stop`, `token_ids`, `prompt_token_ids`, `prompt_logprobs`."""
    fingerprint: str = ""


PromptLogprobs = list[dict[str, dict[str, float | int | str | None]] | None]


class _AboutPrompt(msgspec.Struct):
    """vLLM: of a text completion in the choice, of a chat beside the choices."""

    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class _Choice(_AboutPrompt):
    delta: Said | None = None
    message: Said | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None
    stop_reason: int | str | None = None
    """vLLM: the stop string or token id that ended it."""
    matched_stop: int | str | None = None
    """The same of SGLang."""
    token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Answer(_AboutPrompt):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    system_fingerprint: str | None = None
    error: Any = None


_answers = msgspec.json.Decoder(_Answer)
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for any bytes; the last for what is nested too deep."""


def chunk(data: bytes) -> Chunk:
    """Decodes an event's data or a whole answer. Raises `Garbage`, and `StreamError` for an error object."""
    try:
        found = _answers.decode(data)
    except NOT_JSON:
        raise Garbage("what it sent is no part of a completion") from None
    if found.error is not None:
        raise StreamError(said(found.error))
    usage = None if found.usage is None else _usage(found.usage)
    fingerprint = (found.system_fingerprint or "")[:MAX_FINGERPRINT_CHARACTERS]
    if not found.choices:
        return Chunk(usage=usage, fingerprint=fingerprint)
    choice = found.choices[0]
    text = choice.text or ""
    before: Sequence[AnswerPart] = ()
    after: Sequence[AnswerPart] = ()
    words = choice.delta or choice.message
    if words is not None:
        text = words.content or ""
        if words.has_parts:
            before, after = _parts(words, is_whole=choice.delta is None)
    logprobs: Sequence[TokenLogprob] = ()
    if choice.logprobs:
        try:
            logprobs = logprobs_of(choice.logprobs)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
            raise Garbage("its logprobs are not in OpenAI's shape") from None
    fields = _choice_fields(found, choice)
    return Chunk(text, logprobs, choice.finish_reason or None, usage, before, after, fields, fingerprint)


def _parts(words: Said, *, is_whole: bool) -> tuple[list[AnswerPart], list[AnswerPart]]:
    try:
        before, after = parts_before(words), parts_after(words, is_whole=is_whole)
    except NOT_JSON:
        raise Garbage("its annotations are no JSON") from None
    if is_whole and words.content == "" and (before or after):
        before.append(AnswerPart({"content": ""}, is_generated=False))  # not null: only a whole message tells
    return before, after


def _choice_fields(answer: _Answer, choice: _Choice) -> dict[str, Any]:
    if not choice.finish_reason and choice.token_ids is None and not _says_prompt(answer, choice):
        return {}  # as most chunks
    named: dict[str, Any] = {
        "token_ids": choice.token_ids,
        "prompt_token_ids": answer.prompt_token_ids or choice.prompt_token_ids,
        "prompt_logprobs": answer.prompt_logprobs or choice.prompt_logprobs,
    }
    if choice.finish_reason:
        named |= {"stop_reason": choice.stop_reason, "matched_stop": choice.matched_stop}
    return {
        name: value[:MAX_STOP_CHARACTERS] if isinstance(value, str) else value
        for name, value in named.items()
        if value is not None
    }


def _says_prompt(answer: _Answer, choice: _Choice) -> bool:
    of_answer, of_choice = answer.prompt_token_ids, choice.prompt_token_ids
    ids = of_answer is not None or of_choice is not None
    return ids or answer.prompt_logprobs is not None or choice.prompt_logprobs is not None


def finish_of(word: str) -> tuple[str, str]:
    """Our finish reason, and the server's if it says more or is unknown."""
    if word in FINISHES:
        return FINISHES[word], word if word in TELLING_FINISHES else ""
    return "stop", one_line(word, MAX_FINISH_CHARACTERS)


def _usage(found: _Usage) -> Usage:
    cached = found.prompt_tokens_details.cached_tokens if found.prompt_tokens_details is not None else 0
    details = found.completion_tokens_details
    reasoning = details.reasoning_tokens if details is not None else 0
    usage = Usage(found.prompt_tokens, found.completion_tokens or 0, cached or 0, reasoning or 0)
    counts = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.reasoning_tokens)
    if min(counts) < 0 or max(counts) > MAX_COUNT:
        raise Garbage("its usage is negative or too large")
    return usage


# ---------------------------------------------------------------- refusals


class Meaning(StrEnum):
    """The meaning of a status for the request and for the server."""

    REFUSED = "refused"
    """This request will never run there."""
    BUSY = "busy"
    """Full now; not its fault."""
    FAILED = "failed"
    """Its own fault, or the request's; another replica may succeed."""
    AWAY = "away"
    """A proxy answers for it: no request's fault."""
    KEY = "key"
    """It rejects the gateway's key."""
    UNSURE = "unsure"
    """Refuses this request if it answers others; else the gateway: a wrong path, an unknown model."""


def meaning(status: int) -> Meaning:
    if status in (400, 413, 422):
        return Meaning.REFUSED
    if status == 429:
        return Meaning.BUSY
    if status == 401:
        return Meaning.KEY
    if status in (403, 404, 405):
        return Meaning.UNSURE
    return Meaning.AWAY if status in (502, 503, 504) else Meaning.FAILED


REFUSABLE = frozenset(
    {
        "model", "messages", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
        "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos", "logit_bias", "logprobs",
        "top_logprobs", "stream", "stream_options", "priority", "service_tier", "cache_salt",
        "input", "encoding_format", "dimensions", "query", "documents", "top_n", "truncate_prompt_tokens",
        *PASSED_FIELDS,
    }
)  # fmt: skip
"""Fields of our requests that a refusal may name."""


_LOCATION = re.compile(r"'loc': [\[(]'body', ([^\])]{1,400})")
"""A field in the words of a validation error that vLLM quotes as Python writes it."""
MAX_FIELD_STEPS = 8


def refusal(data: bytes, *known: str) -> tuple[str, str, str | None]:
    """Code, message (without addresses, keys and those `known`) and our field named by a refusing body."""
    error = _error_in(data)
    reason, field = without_secrets(said(error), *known), _field_of(error)
    code = error.get("code") if isinstance(error, dict) else None
    if code == "context_length_exceeded" or "context length" in reason.lower():
        code = "context_length_exceeded"
        what = "the prompt and max_tokens are longer than the context of the server that runs this model"
    else:
        code = "invalid_request"
        refused = "the request" if field is None else f"the field {field!r}"
        what = f"the server that runs this model refuses {refused}"
    return code, f"{what}: {reason}" if reason else what, field


def _field_of(error: object) -> str | None:
    """The field of ours that a refusal names, by `param` or the `loc` of a validation error."""
    if not isinstance(error, dict):
        return None
    detail, param = error.get("detail"), error.get("param")
    if isinstance(param, str):
        steps = re.findall(r"\w+", param)
    elif isinstance(detail, list) and detail and isinstance(detail[0], dict):
        location = detail[0].get("loc")
        steps = [str(step) for step in location if step != "body"] if isinstance(location, list) else []
    else:
        found = _LOCATION.search(str(error.get("message"))[: 16 * MAX_MESSAGE_CHARACTERS])
        steps = re.findall(r"\w+", found[1]) if found is not None else []
    if not steps or steps[0] not in REFUSABLE:
        return None
    field: str = steps[0]
    for step in steps[1:MAX_FIELD_STEPS]:
        if not re.fullmatch(r"\d{1,6}|[a-z_]{1,32}", step):
            break  # the name of a type, or no name at all
        field += f"[{step}]" if step.isdigit() else f".{step}"
    return field


def said_in(data: bytes) -> str:
    """For the log."""
    return said(_error_in(data))


def said(error: object) -> str:
    """Cut to a line of printable characters."""
    message = error.get("message", error.get("detail")) if isinstance(error, dict) else error
    if isinstance(message, list) and message and isinstance(message[0], dict):
        message = message[0].get("msg")
    return one_line(message, MAX_MESSAGE_CHARACTERS) if isinstance(message, str) else ""


def one_line(text: str, most: int) -> str:
    words = "".join(character if character.isprintable() else " " for character in text[: 4 * most]).split()
    return " ".join(words)[:most]


_TELLTALE = re.compile(
    r"""\b\w{2,10}://[^\s"'<>]+"""  # a URL
    r"|(?<![\w.])(?:[\w-]{1,63}\.){1,8}[\w-]{1,63}:\d{2,5}\b"  # a host, or an IPv4 address, and a port
    r"|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\w)"
    r"|(?<![\w:])\[?(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?:\]:\d{1,5}|\])?(?![\w:])"  # perhaps IPv6
    r"|\bBearer\s+[^\s\"',;]+|\b(?:[srp]k|fg_live|fg_test)[-_][\w*.-]{4,}|[\w+/=-]{33,}",
    re.IGNORECASE,
)
_KEY_START = re.compile(r"bearer\s|[srp]k[-_]|fg_", re.IGNORECASE)
_RANDOM = re.compile(r"(?=[^0-9]*[0-9])(?=.*[A-Za-z0-9+=]{20})")
"""What a long run of base64 has, and a path or a model name has not."""
LEAST_CUT = 4
"""Characters of the beginning of a key that are one, at the end of a text that was cut."""


def without_secrets(text: str, *known: str) -> str:
    """A server's text without keys and addresses: those in `known`, and whatever looks like one."""
    for key in filter(None, known):
        text = text.replace(key, "(its key)")
        for length in range(min(len(key), len(text)), LEAST_CUT - 1, -1):
            if text.endswith(key[:length]):
                text = text[:-length] + "(its key)"
                break
    return _TELLTALE.sub(_hidden, text)


def _hidden(found: re.Match[str]) -> str:
    text = found[0]
    if _KEY_START.match(text):
        return "(a key)"
    if ":" not in text and "." not in text:
        return "(a key)" if _RANDOM.match(text) else text
    if text.count(":") > 1 and "://" not in text:  # an IPv6 address, or the time of day
        with suppress(ValueError):
            ip_address(text.lstrip("[").partition("]")[0])
            return "(an address)"
        return text
    return "(an address)"


def _error_in(data: bytes) -> object:
    try:
        found = msgspec.json.decode(data)
    except NOT_JSON:
        return None
    return found.get("error", found) if isinstance(found, dict) else found


# ---------------------------------------------------------------- models


class ListedModel(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    """vLLM, SGLang."""
    context_tokens: int | None = None
    """Fairgate."""
    context_length: int | None = None
    owned_by: str | None = None
    """vLLM and SGLang name themselves here."""

    @property
    def context(self) -> int:
        """0 if the server does not say, or not sensibly."""
        found = self.max_model_len or self.context_tokens or self.context_length or 0
        return found if 0 < found <= MAX_CONTEXT_TOKENS else 0


class _Models(msgspec.Struct):
    data: list[ListedModel]


def models(data: bytes) -> dict[str, ListedModel]:
    """By name. Raises `Garbage`."""
    try:
        found = msgspec.json.decode(data, type=_Models)
    except NOT_JSON:
        raise Garbage("its list of models is not in OpenAI's shape") from None
    return {model.id: model for model in found.data}
