"""One connection: its head, its rest, its refusals, and what comes too early."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import generate_latest

from gateway.http.bounded_http import LINGER_S
from tenants.networks import network_of
from tests.support.http_connection import LIMITS, HttpHouse, MemoryTransport

CHUNKED = b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"


def now_s() -> float:
    return asyncio.get_running_loop().time()


def refusal(transport: MemoryTransport) -> tuple[int, str]:
    """Status and code of the only answer."""
    head, _, body = bytes(transport.written).partition(b"\r\n\r\n")
    assert b"\r\nx-request-id: req_" in head
    assert b"\r\n\r\n" not in body
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def connected(**options: Any) -> tuple[HttpHouse, Any, MemoryTransport]:
    house = HttpHouse(**options)
    return house, *house.connect()


class Held:
    """An application whose requests run until they are let go, or their client leaves."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.running = 0
        self.seen_to_leave = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.running += 1
        await receive()
        leaving = asyncio.create_task(receive())
        going = asyncio.create_task(self.go.wait())
        await asyncio.wait({leaving, going}, return_when=asyncio.FIRST_COMPLETED)
        self.running -= 1
        if leaving.done():
            self.seen_to_leave += 1
        for each in (leaving, going):
            each.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})


@pytest.mark.parametrize(
    "head",
    [
        b"GET /a HTTP/1.1\r\nhost: x\r\nlong: " + b"y" * 3_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 3_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /a HTTP/1.1\r\n" + b"y" * 3_000 + b": z\r\n\r\n",
        b"GET /a HTTP/1.1\r\n" + b"y: z\r\n" * 17 + b"\r\n",
        b"\r\n" * 2_000,
        CHUNKED + b"0\r\nx: " + b"y" * 3_000 + b"\r\n\r\n",
    ],
    ids=["a value", "the URL", "a name", "headers", "empty lines", "a trailer"],
)
@pytest.mark.parametrize("piece_bytes", [1, 700, 10**6])
async def test_a_head_that_is_too_large_is_refused_however_it_is_cut(head: bytes, piece_bytes: int) -> None:
    house, connection, transport = connected()
    for at in range(0, len(head), piece_bytes):
        connection.data_received(head[at : at + piece_bytes])
    assert refusal(transport) == (431, "head_too_large")
    assert transport.has_written_eof, "it is read on, so that the answer gets through"
    assert not transport.is_closing()
    await house.settle()
    house.front.sweep(now_s() + LINGER_S + 1)
    assert transport.is_closing()
    assert len(bytes(transport.written).split(b"HTTP/1.1 ")) == 2, "the request was not answered as well"
    await house.settle()
    assert len(house.table) == 0


async def test_what_the_parser_keeps_of_a_body_is_bounded_too() -> None:
    connection, transport = HttpHouse().connect()
    for piece in (CHUNKED, b"1;name=", b"y" * 2_000, b"y" * 100):
        assert not transport.written
        connection.data_received(piece)
    assert refusal(transport) == (431, "head_too_large")


async def test_a_head_within_the_limits_passes_whatever_the_body_is() -> None:
    house, connection, transport = connected()
    body = b"z" * 100_000
    head = b"POST /a HTTP/1.1\r\nlong: " + b"y" * 1_900 + b"\r\ncontent-length: %d\r\n\r\n" % len(body)
    for at in range(0, len(head + body), 7_000):
        connection.data_received((head + body)[at : at + 7_000])
        await house.settle()
    assert transport.written.startswith(b"HTTP/1.1 200 ")
    assert transport.written.endswith(b"POST /a " + body)


async def test_trailers_do_not_become_headers() -> None:
    seen: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    house, connection, transport = connected(application=application)
    connection.data_received(CHUNKED + b"0\r\nauthorization: Bearer y\r\n\r\n")
    await house.settle()
    assert transport.written.startswith(b"HTTP/1.1 200 ")
    assert [name for name, _ in seen] == [b"host", b"transfer-encoding"]


async def test_a_head_that_trickles_is_ended_and_silence_in_time() -> None:
    house = HttpHouse()
    (_, quiet), (_, half) = house.connect(), house.connect()
    half.protocol.data_received(b"GET /a HTTP/1.1\r\n")  # type: ignore[union-attr]
    begun_s = now_s()
    house.front.sweep(now_s() + 9)
    assert not quiet.is_closing()
    assert not half.written
    half.protocol.data_received(b"x: y\r\n")  # type: ignore[union-attr]
    house.front.sweep(begun_s + LIMITS.head_timeout_s)
    assert refusal(half) == (408, "request_timeout"), "its time counts from its first byte"
    assert not quiet.is_closing()
    house.front.sweep(now_s() + 31)
    assert quiet.is_closing()
    assert not quiet.written
    await house.settle()
    assert len(house.table) == 0
    assert b'fairgate_connections_closed_total{cause="idle"} 2.0' in generate_latest(house.metrics.registry)


async def test_a_request_may_take_any_time_and_the_rest_counts_from_its_answer() -> None:
    held = Held()
    house, connection, transport = connected(application=held)
    connection.data_received(GET)
    await house.settle()
    house.front.sweep(now_s() + 10_000)
    assert not transport.is_closing()
    held.go.set()
    await house.settle()
    assert transport.written.endswith(b"ok")
    house.front.sweep(now_s() + 29)
    assert not transport.is_closing()
    connection.data_received(b"\r\n")  # which is no request
    house.front.sweep(now_s() + 31)
    assert transport.is_closing()


async def test_what_is_no_request_is_refused_in_openais_shape() -> None:
    house = HttpHouse()
    for text in (
        b"hello\r\n\r\n", b"GET /a HTTP/9.9\r\n\r\n", b"CONNECT a:443 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n",
        b"GET /a HTTP/1.1\r\nx\r\n\r\n",
        b"POST /a HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /a HTTP/1.1\r\ncontent-length: 1_0\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ):  # fmt: skip
        connection, transport = house.connect()
        connection.data_received(text)
        await house.settle()
        assert refusal(transport) == (400, "malformed_http"), text
        connection.data_received(b"more")
        connection.connection_lost(None)
    assert len(house.table) == 0


async def test_a_body_that_breaks_off_ends_its_request_without_a_second_answer() -> None:
    house, connection, transport = connected()
    connection.data_received(b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
    await house.settle()
    connection.data_received(b"nonsense\r\n")
    await house.settle()
    assert refusal(transport) == (400, "malformed_http")
    assert not house.state.tasks


@pytest.mark.parametrize("early", [GET, b"POST /b HTTP/1.1\r\nhost: x\r\n", b"nonsense\r\n\r\n"])
@pytest.mark.parametrize("together", [True, False])
async def test_what_comes_before_an_answer_is_not_run_and_ends_the_connection(
    early: bytes, together: bool
) -> None:
    held = Held()
    house, connection, transport = connected(application=held)
    if together:
        connection.data_received(GET + early)
    else:
        connection.data_received(GET)
        await house.settle()
        connection.data_received(early)
    await house.settle()
    connection.data_received(GET * 1_000)
    assert (held.running, transport.is_reading_now) == (1, True)
    held.go.set()
    await house.settle()
    assert transport.written.count(b"HTTP/1.1 200 OK") == 1
    assert b"\r\nconnection: close\r\n" in transport.written
    assert transport.is_closing()
    assert held.running == 0


@pytest.mark.parametrize("early", [b"", GET, GET * 20, b"nonsense\r\n\r\n"])
async def test_a_client_that_leaves_is_seen_to_leave_whatever_it_sent_before(
    early: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    held = Held()
    house, connection, transport = connected(application=held)
    connection.data_received(GET + early)
    await house.settle()
    with caplog.at_level(logging.ERROR):
        transport.close()
        await house.settle()
        assert (held.running, held.seen_to_leave) == (0, 1)
    assert not caplog.records, "no trace of a closed transport"
    assert not house.state.tasks


async def test_a_wish_for_another_protocol_is_passed_over_and_the_body_is_read() -> None:
    house, connection, transport = connected()
    wish = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQ\r\n"
    for method, body in ((b"GET", b""), (b"POST", b"body")):
        transport.written.clear()
        connection.data_received(
            b"%s /a HTTP/1.1\r\nhost: x\r\n%scontent-length: %d\r\n\r\n%s" % (method, wish, len(body), body)
        )
        await house.settle()
        assert transport.written.startswith(b"HTTP/1.1 200 ")
        assert transport.written.endswith(b"\r\n\r\n%s /a %s" % (method, body))
        assert not transport.is_closing()


async def test_an_answer_that_is_not_read_does_not_keep_a_connection_open() -> None:
    async def gives_up(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    house, connection, transport = connected(application=gives_up)
    transport.close = lambda: None  # type: ignore[method-assign]  # it waits for its buffer to empty
    connection.data_received(GET)
    await house.settle()
    assert not transport.is_closing()
    house.front.sweep(now_s() + LINGER_S + 1)
    assert transport.is_closing()


async def test_when_all_places_are_taken_a_connection_without_a_key_gives_way_first() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/known":
            scope["state"]["principal"] = object()
        await HttpHouse().application(scope, receive, send)

    house = HttpHouse(limits=replace(LIMITS, max_connections=3), application=application)
    (known, known_transport), (_, first), (_, second) = (house.connect() for _ in range(3))
    known.data_received(b"GET /known HTTP/1.1\r\n\r\n")
    await house.settle()
    second.protocol.data_received(GET)  # type: ignore[union-attr]
    await house.settle()
    _, third = house.connect()
    assert (first.is_closing(), second.is_closing(), known_transport.is_closing()) == (True, False, False)
    house.connect()
    assert second.is_closing()
    house.connect()
    house.connect()
    assert third.is_closing()
    assert not known_transport.is_closing()
    await house.settle()
    assert len(house.table) == 3


async def test_where_all_have_requests_a_new_connection_is_refused() -> None:
    held = Held()
    house = HttpHouse(limits=replace(LIMITS, max_connections=2), application=held)
    for _ in range(2):
        house.connect()[0].data_received(GET)
    await house.settle()
    _, transport = house.connect()
    assert refusal(transport) == (503, "too_many_connections")
    assert transport.is_closing()
    held.go.set()
    await house.settle()
    assert not house.connect()[1].written, "one that rests gives its place"


async def test_one_address_has_so_many_connections_and_a_64_is_one() -> None:
    house = HttpHouse(limits=replace(LIMITS, max_per_address=2))
    for addresses in (["192.0.2.1", "::ffff:192.0.2.1"], ["2001:db8::1", "2001:db8::ffff:2"]):
        for address in addresses:
            assert not house.connect(address)[1].written
        assert refusal(house.connect(addresses[0])[1]) == (429, "address_has_too_many")
    assert not house.connect("2001:db8:0:1::1")[1].written
    connection, _ = house.connect("192.0.2.2")
    connection.connection_lost(None)
    assert not house.connect("192.0.2.2")[1].written


async def test_behind_a_proxy_requests_are_counted_by_the_address_that_it_names() -> None:
    held = Held()
    limits = replace(LIMITS, max_per_address=1)
    house = HttpHouse(limits=limits, application=held, trusted=(network_of("10.0.0.0/8"),))

    def ask(client: str) -> MemoryTransport:
        connection, transport = house.connect("10.0.0.1")
        connection.data_received(f"GET /a HTTP/1.1\r\nx-forwarded-for: {client}\r\n\r\n".encode())
        return transport

    running = [ask("198.51.100.1"), ask("2001:db8::1"), ask("198.51.100.2")]
    await house.settle()
    assert held.running == 3
    for address in ("198.51.100.1", "2001:db8::2"):
        refused = ask(address)
        await house.settle()
        assert refusal(refused) == (429, "address_has_too_many")
        assert not refused.is_closing(), "the proxy's connection is others', too"
    held.go.set()
    await house.settle()
    assert all(each.written.endswith(b"ok") for each in running)
    again = ask("198.51.100.1")
    await house.settle()
    assert again.written.endswith(b"ok")


async def test_a_request_that_meets_a_drain_is_answered_and_is_the_last_of_its_connection() -> None:
    house, connection, transport = connected()
    connection.data_received(GET)
    await house.settle()
    connection.shutdown()
    assert not transport.is_closing(), "the next request may be on its way"
    transport.written.clear()
    connection.data_received(GET)
    await house.settle()
    assert transport.written.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nconnection: close\r\n" in transport.written
    assert transport.is_closing()


async def test_an_answer_that_began_before_a_drain_may_be_followed_by_one_request() -> None:
    """Its head did not say that it is the last: a client sends the next one at its end."""
    go = asyncio.Event()

    async def begun(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await go.wait()
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})

    house, connection, transport = connected(application=begun)
    connection.data_received(GET)
    await house.settle()
    connection.shutdown()
    go.set()
    await house.settle()
    assert transport.written.endswith(b"ok")
    assert b"\r\nconnection: close\r\n" not in transport.written
    assert not transport.is_closing()
    connection.data_received(GET)
    await house.settle()
    assert transport.written.endswith(b"\r\nconnection: close\r\n\r\nok")
    assert transport.is_closing()
