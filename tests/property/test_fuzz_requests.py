"""Anything that a client may send, in any pieces.

Every byte string ends in an answer or in silence, never in an exception, a broken answer, or memory without a
bound. What a longer search found is a case here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Iterator
from typing import Any

import httptools
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.http.client_address import client_address
from gateway.http.estimate_bounds import max_cost_nanousd, max_wait_s
from gateway.http.request_timeout import timeout_s
from gateway.requests.parse import parse_chat, parse_text
from gateway.requests.schemas import ChatCompletionRequest, CompletionRequest, decode
from tenants.networks import network_of
from tests.support.http_connection import LIMITS, HttpHouse, MemoryTransport
from tests.unit.gateway.requests.test_parse import context

WORDS = [
    b"GET",
    b"POST",
    b"HEAD",
    b"CONNECT",
    b"PRI",
    b" ",
    b"/",
    b"/a",
    b"http://x/",
    b"*",
    b"%00",
    b"?q=\xff",
    b"#",
    b" HTTP/1.1",
    b" HTTP/1.0",
    b" HTTP/2.0",
    b"\r\n",
    b"\r",
    b"\n",
    b"\r\n\r\n",
    b"\0",
    b"\t",
    b": ",
    b":",
    b",",
    b"host: x\r\n",
    b"content-length: 5\r\n",
    b"content-length: 0\r\n",
    b"content-length: 1_0\r\n",
    b"content-length: 99999999999999999999\r\n",
    b"transfer-encoding: chunked\r\n",
    b"transfer-encoding: gzip\r\n",
    b"connection: close\r\n",
    b"connection: keep-alive, upgrade\r\n",
    b"connection: upgrade\r\nupgrade: h2c\r\n",
    b"upgrade: websocket\r\n",
    b"expect: 100-continue\r\n",
    b"5\r\nhello\r\n",
    b"0\r\n\r\n",
    b"0\r\nx: y\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"-1\r\n",
    b"1;x=y\r\na\r\n",
    b"x: " + b"y" * 3_000,
    b"z" * 3_000,
    b"hello",
    b" folded\r\n",
    b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello",
    b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n",
]
streams = st.lists(st.sampled_from(WORDS) | st.binary(max_size=8), max_size=30).map(b"".join)
cuts = st.lists(st.integers(1, 4_000), min_size=1, max_size=8)
BEGUN = 100
"""Statuses of this hundred announce another answer."""


def pieces(text: bytes, sizes: list[int]) -> Iterator[bytes]:
    """The text in pieces of these sizes, over and over."""
    at = number = 0
    while at < len(text):
        size = sizes[number % len(sizes)]
        yield text[at : at + size]
        at, number = at + size, number + 1


class Answers:
    """Parses what was written, by the rules of a client. Raises `HttpParserError` for what is no answer."""

    def __init__(self, written: bytes, *, to_head: bool) -> None:
        self.statuses: list[int] = []
        self.complete = 0
        self.body = b""
        self._parser = httptools.HttpResponseParser(self)
        if not to_head:  # whose answers have a length and no body
            self._parser.feed_data(written)

    def on_headers_complete(self) -> None:
        self.statuses.append(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete += 1


async def send(house: HttpHouse, text: bytes, sizes: list[int], *, leaves: bool) -> MemoryTransport:
    """Sends it on one connection; checks what is kept after each piece, and that the end is an end."""
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    connection, transport = house.connect()
    for piece in pieces(text, sizes):
        if transport.is_closing() or not transport.is_reading_now:
            break
        connection.data_received(piece)
        kept = [*(connection.headers or []), (getattr(connection, "url", b""), b"")]
        assert len(kept) <= LIMITS.max_headers + 1
        assert sum(len(name) + len(value) for name, value in kept) <= LIMITS.max_head_bytes + len(piece)
        await asyncio.sleep(0)
    await house.settle()
    if leaves and not transport.is_closing():
        transport.close()
    house.front.sweep(math.inf)  # a request whose body does not come is the application's to end
    await house.settle()
    if not transport.is_closing():
        transport.close()
    await house.settle()
    assert not faults
    assert not house.state.tasks
    assert len(house.table) == 0
    return transport


@given(text=streams, sizes=cuts, leaves=st.booleans())
@example(text=b"\r\n" * 3_000, sizes=[1_000], leaves=False)
@example(text=b"GET /a HTTP/1.1\r\nx: " + b"y" * 9_000, sizes=[999], leaves=True)
@example(text=b"CONNECT a:1 HTTP/1.1\r\n\r\n", sizes=[9_000], leaves=False)
@example(
    text=b"POST /a HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 5\r\n\r\nhello" * 2,
    sizes=[50],
    leaves=False,
)
def test_any_bytes_end_in_answers_or_in_silence(text: bytes, sizes: list[int], leaves: bool) -> None:
    errors: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = errors.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        transport = asyncio.run(send(HttpHouse(), text, sizes, leaves=leaves))
    finally:
        logging.getLogger().removeHandler(handler)
    assert not errors
    answers = Answers(bytes(transport.written), to_head=b"HEAD" in text)
    final = [status for status in answers.statuses if status >= 2 * BEGUN]
    assert all(status in (200, 400, 408, 431) for status in final)
    assert sum(status != 200 for status in final) <= 1
    assert answers.complete >= len(final), "each answer is whole"


tokens = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=12).map(str.encode)
headers = st.lists(st.tuples(tokens.map(lambda name: b"x-" + name), st.binary(max_size=20)), max_size=8)


@given(
    method=st.sampled_from([b"GET", b"POST", b"PUT", b"DELETE", b"PATCH"]),
    path=tokens,
    fields=headers,
    body=st.binary(max_size=300),
    chunk_bytes=st.integers(0, 60),
    upgrade=st.booleans(),
    sizes=cuts,
)
def test_a_valid_request_in_any_pieces_is_the_same_request(
    method: bytes,
    path: bytes,
    fields: list[tuple[bytes, bytes]],
    body: bytes,
    chunk_bytes: int,
    upgrade: bool,
    sizes: list[int],
) -> None:
    lines = [method + b" /" + path + b" HTTP/1.1", b"host: x"]
    lines += [
        name + b": " + bytes(each for each in value if each >= 32 and each != 127) for name, value in fields
    ]
    if upgrade:
        lines += [b"connection: upgrade", b"upgrade: h2c"]
    if chunk_bytes:
        chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in pieces(body, [chunk_bytes])]
        text = b"\r\n".join([*lines, b"transfer-encoding: chunked", b"", b""])
        text += b"".join(chunks) + b"0\r\nx-trailer: y\r\n\r\n"
    else:
        text = b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body])
    transport = asyncio.run(send(HttpHouse(), text, sizes, leaves=False))
    answers = Answers(bytes(transport.written), to_head=False)
    assert answers.statuses == [200]
    assert answers.body == method + b" /" + path + b" " + body


FIELDS = [
    "model",
    "messages",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "stop",
    "stream",
    "temperature",
    "top_p",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "metadata",
    "user",
    "safety_identifier",
    "service_tier",
    "seed",
    "tools",
    "tool_choice",
    "response_format",
    "stream_options",
    "role",
    "content",
    "type",
    "text",
    "echo",
    "suffix",
    "best_of",
    "presence_penalty",
    "frequency_penalty",
    "name",
    "ignore_eos",
]
leaves_of_json = (
    st.none() | st.booleans() | st.integers() | st.integers(-(10**400), 10**400) | st.floats()
    | st.text(max_size=20) | st.sampled_from(["m", "user", "assistant", "auto", "text", "0", "1_0", "\udc00"])
)  # fmt: skip
values = st.recursive(
    leaves_of_json,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=9), inner, max_size=6)
    ),
    max_leaves=12,
)
WHOLE = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}
bodies = (
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=5).map(
        lambda found: json.dumps(WHOLE | found).encode()
    )
    | values.map(lambda found: json.dumps(found).encode())
    | st.binary(max_size=60)
)


@given(bodies)
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b'{"model": "m", "prompt": "x", "max_tokens": ' + b"9" * 100_000 + b"}")
@example(b'{"model": "m", "prompt": "x", "temperature": 1e999}')
@example(b'{"model": "m", "prompt": "\\ud800"}')
@example(b'{"model": "m", "prompt": "x", "' + b"y" * 500_000 + b'": 1}')
def test_any_body_is_a_call_or_a_refusal(body: bytes) -> None:
    both: list[tuple[Any, Any]] = [(ChatCompletionRequest, parse_chat), (CompletionRequest, parse_text)]
    for kind, parse in both:
        # Each schema refuses the other's fields.
        other = b'"prompt"' if kind is ChatCompletionRequest else b'"messages"'
        refusal, call = None, None
        try:
            call = parse(decode(body.replace(other, b'"user"'), kind), context())
        except ApiError as error:
            refusal = error
        if refusal is None:
            assert 1 <= call.max_tokens <= 100
        else:
            assert 400 <= refusal.status < 500
            assert len(refusal.body()) < 10_000
            msgspec.json.decode(refusal.body())


numbers = (
    st.text(max_size=12) | st.floats().map(str) | st.from_regex(r"[-+ ]?[0-9_]*[.,]?[0-9]*([eE][-+]?[0-9]+)?")
)


@given(numbers)
@example("1_0")
@example("inf")
@example("1e999")
@example("9" * 60_000)
@example("\u0661")
def test_any_text_in_a_header_is_a_number_or_a_refusal(text: str) -> None:
    readers: list[Any] = [lambda each: timeout_s(each, None), max_wait_s, max_cost_nanousd]
    for read in readers:
        found = 0.0
        with contextlib.suppress(ApiError):
            found = read(text)
            assert "_" not in text
        assert 0 <= found < math.inf


@pytest.mark.parametrize("which", ["x-forwarded-for", "forwarded"])
@given(text=st.text(' ,;="\\:[].forFOR0123456789abcdef_', max_size=60) | st.text(max_size=30))
def test_any_forwarded_header_names_an_address_or_none(which: str, text: str) -> None:
    trusted = (network_of("10.0.0.0/8"),)
    said = (text, trusted) if which == "x-forwarded-for" else ("", trusted, text)
    found = client_address("10.0.0.1", *said)
    assert found is None or str(found)
    # What stands further left counts for nothing: a client cannot reach over what its proxy says of it.
    behind = f"{text}, 192.0.2.1" if which == "x-forwarded-for" else f"{text}, for=192.0.2.1"
    said = (behind, trusted) if which == "x-forwarded-for" else ("", trusted, behind)
    assert str(client_address("10.0.0.1", *said)) in ("192.0.2.1", "None")
