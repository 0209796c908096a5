"""Reads the log probabilities that another server sends with an answer. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

from engine.messages import TokenLogprob
from gateway.upstream.base import ServerLogprob

MAX_TOKEN_CHARACTERS = 256
"""Longer ones are cut."""
MAX_ALTERNATIVES = 20
"""As in OpenAI's API."""


def logprobs_of(found: dict[str, Any]) -> Sequence[TokenLogprob]:
    """Of a choice's `logprobs` in chat or completion form. Token ids are 0 (only texts are sent); a missing
    probability is NaN. Raises KeyError, TypeError, ValueError, AttributeError or OverflowError."""
    if found.get("content") is not None:
        return [_chat_logprob(item) for item in found["content"]]
    if not found.get("tokens"):
        return []
    tops = found.get("top_logprobs") or [{}] * len(found["tokens"])
    return [
        TokenLogprob(
            0,
            _token(token),
            math.nan if logprob is None else float(logprob),
            [
                (0, _token(text), float(value))
                for text, value in islice((top or {}).items(), MAX_ALTERNATIVES)
            ],
        )
        for token, logprob, top in zip(found["tokens"], found["token_logprobs"], tops, strict=True)
    ]


def _chat_logprob(item: dict[str, Any]) -> ServerLogprob:
    shown = _entry(item)
    tops = [_entry(alternative) for alternative in (item.get("top_logprobs") or [])[:MAX_ALTERNATIVES]]
    shown["top_logprobs"] = tops
    return ServerLogprob(
        0,
        shown["token"],
        shown["logprob"],
        [(0, alternative["token"], alternative["logprob"]) for alternative in tops],
        shown,
    )


def _entry(item: dict[str, Any]) -> dict[str, Any]:
    token = _token(item["token"])
    raw = item.get("bytes")
    if raw is not None:
        raw = list(bytes(raw[: 4 * MAX_TOKEN_CHARACTERS]))
    elif "bytes" not in item:
        raw = list(token.encode(errors="replace"))
    return {"token": token, "logprob": float(item["logprob"]), "bytes": raw}


def _token(text: object) -> str:
    return str(text)[:MAX_TOKEN_CHARACTERS]
