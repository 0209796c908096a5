"""Answers of embedding and rerank endpoints: checked in their shape, their numbers passed on unread.

A vector is scanned by characters only, as decoding millions of numbers would block the event loop. The
checked list is the one piece of the answer; no output token is counted. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from gateway.upstream.answer_parts import Garbage
from gateway.upstream.base import RequestTask, Wording
from gateway.upstream.lease_buffer import BufferedChunk
from gateway.upstream.openai.response import MAX_COUNT, NOT_JSON, Chunk, StreamError, Usage, said
from gateway.upstream.openai.response_reader import WholeResponse
from gateway.upstream.openai.token_count import TokenCount

NUMBERS = b"0123456789+-.eE, \t\r\n"
BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="


class _VectorUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    total_tokens: int | None = None


class _Vector(msgspec.Struct):
    index: int
    embedding: msgspec.Raw


class _Vectors(msgspec.Struct):
    data: list[_Vector] | None = None
    usage: _VectorUsage | None = None
    error: Any = None


class _Score(msgspec.Struct, omit_defaults=True):
    index: int
    relevance_score: float
    document: Any = None


class _Scores(msgspec.Struct):
    results: list[_Score] | None = None
    usage: _VectorUsage | None = None
    error: Any = None


AnyShape = TypeVar("AnyShape", _Vectors, _Scores)


class VectorsResponse(WholeResponse):
    """Reads the JSON body of an endpoint without output tokens."""

    max_bytes = 32 * 2**20

    def __init__(self, wording: Wording) -> None:
        super().__init__(TokenCount(0, None))
        self._wording = wording

    def _read(self, body: bytes) -> Sequence[BufferedChunk]:
        fields = self._wording.fields
        if self._wording.task is RequestTask.EMBED:
            found, usage = read_vectors(body, len(fields["input"]))
        else:
            found, usage = read_scores(body, len(fields["documents"]))
        if usage is not None:
            self.count.saw(Chunk(usage=_usage_of(usage)))
        self.finish = "stop"
        self.is_complete = True
        return [BufferedChunk(0, found.decode(), (), len(body))]


def read_vectors(body: bytes, inputs: int) -> tuple[bytes, _VectorUsage | None]:
    """The JSON list of `inputs` embeddings, and the server's count. Raises `Garbage`, `StreamError`."""
    found = _decoded(body, _Vectors, "its embeddings are not in OpenAI's shape")
    data = found.data or []
    if sorted(item.index for item in data) != list(range(inputs)):
        raise Garbage("it did not answer with one embedding for each input")
    if not all(_is_vector(bytes(item.embedding)) for item in data):
        raise Garbage("an embedding is neither a list of numbers nor base64")
    shown = [{"object": "embedding", "index": item.index, "embedding": item.embedding} for item in data]
    return msgspec.json.encode(shown), found.usage


def read_scores(body: bytes, documents: int) -> tuple[bytes, _VectorUsage | None]:
    """The JSON list of scores, each document at most once, and the count. Raises `Garbage`, `StreamError`."""
    found = _decoded(body, _Scores, "its scores are in no known shape")
    results = found.results
    if results is None:
        raise Garbage("it sent no results")
    places = [result.index for result in results]
    if len(set(places)) != len(places) or not set(places) <= set(range(documents)):
        raise Garbage("its results name documents that were not sent, or one twice")
    if not all(math.isfinite(result.relevance_score) for result in results):
        raise Garbage("a score is not a finite number")
    return msgspec.json.encode(results), found.usage


def _decoded(body: bytes, shape: type[AnyShape], otherwise: str) -> AnyShape:
    try:
        found = msgspec.json.decode(body, type=shape)
    except NOT_JSON:
        raise Garbage(otherwise) from None
    if found.error is not None:
        raise StreamError(said(found.error))
    return found


def _is_vector(raw: bytes) -> bool:
    if raw[:1] == b"[":
        return not raw[1:-1].translate(None, NUMBERS) and len(raw) > 2
    return raw[:1] == b'"' and not raw[1:-1].translate(None, BASE64) and len(raw) > 2


def _usage_of(found: _VectorUsage) -> Usage | None:
    tokens = found.prompt_tokens if found.prompt_tokens is not None else found.total_tokens
    if tokens is None:
        return None
    if not 0 <= tokens <= MAX_COUNT:
        raise Garbage("its usage is negative or too large")
    return Usage(tokens, 0)
