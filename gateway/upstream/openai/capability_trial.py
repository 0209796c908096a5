"""Requests of one token that show what a server can do, and what an answer to one means. Pure."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from gateway.upstream.capabilities import Capability
from gateway.upstream.openai.request import CHAT_PATH, EMBEDDINGS_PATH, RERANK_PATH, TEXT_PATH
from gateway.upstream.openai.response import NOT_JSON, said_in
from gateway.upstream.openai.server_kinds import KIND_TRIALS, ServerKind

IMAGE_SIDE = 56
"""Pixels: some vision models take none that is smaller."""
SAMPLE_HZ, SOUND_SAMPLES = 8_000, 1_000
MAX_TOKENS = 1


class TrialResult(StrEnum):
    CAN = "can"
    CANNOT = "cannot"
    FAILED = "failed"
    """Its own error: a refusal, if it answers plain text right after."""
    UNKNOWN = "unknown"
    """Full, away, or refuses the gateway: nothing learned."""


@dataclass(frozen=True, slots=True)
class Trial:
    word: Capability
    path: str
    body: bytes


def text_trials(model: str) -> tuple[Trial, Trial]:
    """As a chat, and as a text completion for servers without a chat template."""
    return (
        Trial(Capability.TEXT, CHAT_PATH, msgspec.json.encode(_chat(model))),
        Trial(Capability.TEXT, TEXT_PATH, msgspec.json.encode(_text(model))),
    )


def trials(model: str, kind: ServerKind, *, is_chat: bool) -> list[Trial]:
    """One for each further word of a generating server, as chats or as text completions."""
    fields = {**_FIELDS, Capability.EXTRA_FIELDS: KIND_TRIALS.get(kind, {})}
    if not is_chat:
        fields = {word: field for word, field in fields.items() if word in _OF_TEXT}
    path, body = (CHAT_PATH, _chat(model)) if is_chat else (TEXT_PATH, _text(model))
    return [
        Trial(word, path, msgspec.json.encode({**body, **field})) for word, field in fields.items() if field
    ]


def vector_trials(model: str) -> list[Trial]:
    embeddings = {"model": model, "input": "Hi"}
    rerank = {"model": model, "query": "Hi", "documents": ["Hi"]}
    return [
        Trial(Capability.EMBEDDINGS, EMBEDDINGS_PATH, msgspec.json.encode(embeddings)),
        Trial(Capability.RERANK, RERANK_PATH, msgspec.json.encode(rerank)),
    ]


def result_of(status: int, body: bytes) -> tuple[TrialResult, str]:
    """The meaning of an answer, and the server's own reason in a line."""
    if status == 200:
        try:
            answer = msgspec.json.decode(body)
        except NOT_JSON:
            return TrialResult.UNKNOWN, "its answer is no JSON"
        if isinstance(answer, dict) and answer.get("error"):
            return TrialResult.CANNOT, said_in(body)
        return TrialResult.CAN, ""
    reason = f"{status} {said_in(body)}".strip()
    if status in (400, 404, 405, 413, 415, 422, 501):
        return TrialResult.CANNOT, reason
    return (TrialResult.FAILED if status == 500 else TrialResult.UNKNOWN), reason


def white_image(side: int) -> str:
    """A PNG as a data URL."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = (b"\0" + b"\xff" * (3 * side)) * side
    chunks = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunks).decode()


def silence(samples: int) -> str:
    """A WAV in base64: one channel of 8 bits at `SAMPLE_HZ`."""
    form = struct.pack("<IHHIIHH", 16, 1, 1, SAMPLE_HZ, SAMPLE_HZ, 1, 8)
    body = b"WAVEfmt " + form + b"data" + struct.pack("<I", samples) + b"\x80" * samples
    return base64.b64encode(b"RIFF" + struct.pack("<I", len(body)) + body).decode()


def _with(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, part]}]}


def _chat(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": MAX_TOKENS}


def _text(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": "Hi", "max_tokens": MAX_TOKENS}


_OBJECT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
_TOOLS = [
    {"type": "function", "function": {"name": "probe", "description": "A probe.", "parameters": _OBJECT}}
]
_IMAGE = {"type": "image_url", "image_url": {"url": white_image(IMAGE_SIDE)}}
_SOUND = {"type": "input_audio", "input_audio": {"data": silence(SOUND_SAMPLES), "format": "wav"}}
_FIELDS: Mapping[Capability, Mapping[str, Any]] = {
    Capability.TOOLS: {"tools": _TOOLS, "tool_choice": "auto"},
    Capability.FORCED_TOOLS: {"tools": _TOOLS, "tool_choice": "required"},
    Capability.JSON_OBJECT: {"response_format": {"type": "json_object"}},
    Capability.JSON_SCHEMA: {
        "response_format": {"type": "json_schema", "json_schema": {"name": "probe", "schema": _OBJECT}}
    },
    Capability.REASONING: {"reasoning_effort": "low"},
    Capability.IMAGES: _with(_IMAGE),
    Capability.AUDIO: _with(_SOUND),
}
_OF_TEXT = (Capability.JSON_OBJECT, Capability.JSON_SCHEMA, Capability.EXTRA_FIELDS)
