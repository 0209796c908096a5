"""Fuzz of what other servers send: events, answers, heads, refusals, lists of models and metrics pages.

Whatever comes, in whatever pieces, is an answer or one of the declared errors; what is kept of it, and how
much of it passes, is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tracemalloc
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.upstream.answer_parts import Garbage
from gateway.upstream.health import saturation
from gateway.upstream.http.connection import MAX_HEADER_BYTES, MAX_HEADERS, Connection
from gateway.upstream.http.sse import EventTooLarge, SseParser
from gateway.upstream.openai import outcome, response
from gateway.upstream.openai.response import StreamError
from gateway.upstream.openai.response_reader import CutShort, StreamedResponse, WholeResponse
from gateway.upstream.openai.token_count import (
    BYTES_MARGIN_TOKENS,
    LONGEST_TOKEN_BYTES,
    MARGIN_TOKENS,
    TokenCount,
)

MOST_TOKENS = 20
FAULTS = (Garbage, EventTooLarge, StreamError, CutShort)

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
TOP = {"token": "a", "logprob": -0.5}
CHAT_LOGPROBS = {"content": [TOP | {"top_logprobs": [TOP]}]}
TEXT_LOGPROBS = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}]}
VALUES: list[Any] = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"content": "h\u00e4\U0001f600"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"reasoning_content": "hmm"}, "logprobs": CHAT_LOGPROBS}]},
    {"choices": [{"index": 0, "text": "a", "logprobs": TEXT_LOGPROBS}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
    {"choices": [{"index": 0, "message": {"content": "all"}, "finish_reason": "stop"}], "usage": USAGE},
    {"choices": [], "usage": USAGE},
    {"error": {"message": "no", "code": "context_length_exceeded", "param": "top_k"}},
    {"object": "list", "data": [{"id": "m", "max_model_len": 1024, "owned_by": "vllm"}]},
]
BODIES = [json.dumps(each).encode() for each in VALUES]
EVENTS = [b"data: %s\n\n" % each for each in BODIES] + [b": ping\n\n", b"event: x\r\ndata: a\r\n\r\n"]
STREAM = b"".join(EVENTS[:7]) + b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n6;x=y\r\nabcdef\r\n0\r\nt: u\r\n\r\n"
ANSWERS = [
    HEAD + b"content-length: 4\r\n\r\nabcd",
    CHUNKED,
    b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED,
    b"HTTP/1.1 400 x\r\n\r\nuntil the end",
    b"HTTP/1.0 204 x\r\n\r\n",
]
PAGE = b'# HELP x\nvllm:num_requests_running{model="m"} 3.0\nfairgate_engine_kv_blocks{state="free"} 1e3 17\n'
NASTY = st.sampled_from(
    [b"\n", b"\r", b"\r\n\r\n", b"data: ", b"[DONE]", b"\xff", b"\\ud800", b"[", b"{", b'"', b"1e999", b"-1",
     b"9999999999999999999999", b"null", b"0", b"NaN", b"\0", b"ffffffffffffffff\r\n"]
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, whole: list[bytes]) -> bytes:
    """Something valid with some bytes replaced, inserted or cut out, or with another one's tail."""
    data = bytearray(draw(st.sampled_from(whole)))
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("replace", "insert", "cut", "splice"))):
            case "replace":
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=4) | NASTY)
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=8) | NASTY) * draw(
                    st.sampled_from((1, 1, 300, 20_000))
                )
            case "cut":
                del data[at : at + draw(st.integers(1, 30))]
            case _:
                other = draw(st.sampled_from(whole))
                data[at:] = other[draw(st.integers(0, len(other))) :]
    return bytes(data)


CUTS = st.lists(st.integers(0, 2**20), max_size=6)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(edges)]


@given(data=damaged([STREAM, *EVENTS]), cuts=CUTS, limit=st.sampled_from((40, 1_000, 2**20)))
@example(data=b"data: a\n\r", cuts=[], limit=40)
@example(data=b"x" * 41, cuts=[], limit=40)
def test_any_bytes_are_the_same_events_in_any_pieces_or_too_large(
    data: bytes, cuts: list[int], limit: int
) -> None:
    def events(parts: list[bytes]) -> tuple[list[bytes], bool]:
        parser, found = SseParser(limit), []
        try:
            for part in parts:
                found += parser.feed(part)
                assert len(parser._rest) <= limit
        except EventTooLarge:
            return found, True
        return found, False

    once, is_too_large = events([data])
    found, was_too_large = events(pieces(data, cuts))
    if not is_too_large and not was_too_large:
        assert found == once
    else:
        # An event within the limit may be followed, in the same piece, by one that is not; and a line's end
        # of two bytes counts as one where it comes whole.
        assert found[: len(once)] == once or once[: len(found)] == found
    assert all(len(each) <= limit for each in found)


def test_events_in_tiny_pieces_take_linear_work() -> None:
    """A line that never ends was copied whole with each of its pieces."""
    parser = SseParser()
    tracemalloc.start()
    for _ in range(10_000):
        assert parser.feed(b"x" * 100) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 2**20
    with pytest.raises(EventTooLarge):
        parser.feed(b"x" * 2**20)


@given(data=damaged(BODIES) | damaged(BODIES).map(lambda body: body * 3))
@example(data=b"[" * 100_000)
@example(data=b'{"error":' * 100_000)
@example(data=b'{"choices": [{"logprobs": {"content": ' + b"[" * 500 + b"]" * 500 + b"}}]}")
@example(data=b'{"usage": {"prompt_tokens": 99999999999999999999, "completion_tokens": 1}}')
def test_any_body_is_understood_or_garbage(data: bytes) -> None:
    with contextlib.suppress(Garbage, StreamError):
        usage = response.chunk(data).usage
        assert usage is None or 0 <= usage.completion_tokens <= response.MAX_COUNT
    code, message, _ = response.refusal(data)
    assert code in ("invalid_request", "context_length_exceeded")
    assert len(message) < 200 + response.MAX_MESSAGE_CHARACTERS
    assert response.said_in(data).isprintable()
    for status in (302, 400, 401, 429, 500):
        assert str(outcome.of_refusal(status, data)[1])
    with contextlib.suppress(Garbage):
        contexts = [each.context for each in response.models(data).values()]
        assert all(0 <= each <= response.MAX_CONTEXT_TOKENS for each in contexts)


@given(
    data=damaged([STREAM, *BODIES]),
    cuts=CUTS,
    tokenize=st.sampled_from([None, len]),
    is_streamed=st.booleans(),
)
def test_any_answer_is_bounded_by_what_was_asked_for(
    data: bytes, cuts: list[int], tokenize: Callable[[str], int] | None, is_streamed: bool
) -> None:
    count = TokenCount(MOST_TOKENS, tokenize)
    answer = StreamedResponse(count) if is_streamed else WholeResponse(count)
    found = []
    for part in pieces(data, cuts):
        if answer.fault is None and not answer.is_complete:
            found += answer.feed(part)
    if answer.fault is None and not answer.is_complete:
        found += answer.close()
    assert answer.fault is None or isinstance(answer.fault, FAULTS)
    came = sum(each.tokens for each in found)
    assert came <= count.tokens <= MOST_TOKENS
    assert came == count.tokens or answer.fault is not None
    assert sum(len(each.logprobs) for each in found) <= MOST_TOKENS
    margin = BYTES_MARGIN_TOKENS if tokenize is None else MARGIN_TOKENS
    most_bytes = (MOST_TOKENS + MOST_TOKENS // 8 + margin + 1) * LONGEST_TOKEN_BYTES
    assert sum(len(each.text.replace(chr(0xFFFD), "").encode()) for each in found) <= most_bytes
    if answer.finish is not None:
        tokens, basis = count.final()
        assert 0 <= tokens <= MOST_TOKENS
        assert basis in ("upstream", "tokenizer", "estimate")
    assert count.contradiction in ("", "overrun", "usage_low", "usage_high")


class Listening:
    """The reader of one response, and the owner of its connection."""

    def __init__(self) -> None:
        self.headers: Mapping[str, str] = {}
        self.body_bytes = 0
        self.ends = 0

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.headers = headers

    def body(self, data: bytes) -> None:
        assert not self.ends
        self.body_bytes += len(data)

    def end(self) -> None:
        self.ends += 1

    def lost(self, reason: str) -> None:
        assert reason.isprintable()
        self.ends += 1

    def released(self, connection: Connection) -> None: ...

    def gone(self, connection: Connection) -> None: ...


class Wire(asyncio.Transport):
    """Where a connection writes to."""

    is_cut = False

    def write(self, data: Any) -> None: ...

    def abort(self) -> None:
        self.is_cut = True

    close = abort

    def is_closing(self) -> bool:
        return self.is_cut

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@given(data=damaged(ANSWERS), cuts=CUTS)
@example(data=HEAD + b"x: " + b"y" * 200_000, cuts=[50_000, 100_000, 150_000])
@example(data=b"HTTP/1.1 100 Continue\r\n\r\n" * 9_000, cuts=[50_000, 100_000, 150_000])
def test_any_response_ends_once_with_bounded_headers(data: bytes, cuts: list[int]) -> None:
    async def receive() -> None:
        reader = Listening()
        wire, connection = Wire(), Connection(reader)
        connection.connection_made(wire)
        connection.send(b"GET / HTTP/1.1\r\n\r\n", reader)
        for part in pieces(data, cuts):
            if not wire.is_cut:
                connection.data_received(part)
        connection.connection_lost(None)
        assert reader.ends == 1
        assert reader.body_bytes <= len(data)
        assert len(reader.headers) <= MAX_HEADERS
        assert sum(len(name) + len(value) for name, value in reader.headers.items()) <= MAX_HEADER_BYTES
        assert connection._head_timer is None

    asyncio.run(receive())


@pytest.mark.parametrize(
    ("before", "again"),
    [
        (HEAD, b"x: " + b"y" * 4_000),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 160),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n5;x=", b"y" * 4_000),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ", b"y" * 4_000),
        (b"", b"\r\n" * 2_000),
    ],
)
async def test_what_brings_no_content_is_bounded(before: bytes, again: bytes) -> None:
    reader = Listening()
    wire, connection = Wire(), Connection(reader)
    connection.connection_made(wire)
    connection.send(b"GET / HTTP/1.1\r\n\r\n", reader)
    connection.data_received(before + again)
    received = len(before + again)
    while not wire.is_cut:
        connection.data_received(again)
        received += len(again)
        assert received <= MAX_HEADER_BYTES + len(before) + len(again)
    assert reader.ends == 1


@given(page=damaged([PAGE]))
@example(page=b"vllm:num_requests_running 1e999\nvllm:num_requests_waiting 1e308\n")
def test_any_metrics_page_gives_a_load_or_none(page: bytes) -> None:
    seen = saturation.read(page.decode("utf-8", "replace"))
    assert 1 <= saturation.window(seen, 32, 3) <= 32
