"""HTTP/1.1 on one connection, bounded before any key is read.

uvicorn's protocol on httptools, with bounds on size and time of a head, on the rest between requests and on
the number of connections (`connection_table.py`). Every callback does a fixed amount of work. After a refusal
the connection is half closed and read on for a moment: the kernel drops what is sent on one that is closed
while its client still sends. A pipelined request is not run: the connection closes after the answer before
it, as RFC 9112 (9.3.2) allows, so what a client sends too early cannot hide that it disconnects.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httptools
from litestar.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway import errors
from gateway.domain.ids import new_request_id
from gateway.errors import ApiError
from gateway.http.admin_listener import AdminListener, require_listener
from gateway.http.asgi import FIRST_BYTE, SIBLING, begin, encode_headers, send_json
from gateway.http.client_address import client_of
from gateway.http.connection_table import UNCOUNTED, ConnectionTable
from gateway.metrics.registry import Metrics
from gateway.requests.dialects import messages
from gateway.workers.siblings import CLIENT
from tenants.networks import Network, address_of, counted_as, is_within

LINGER_S = 2.0
"""How long a connection is still read after a refusal, and how long an unread answer may keep it open."""
LAST_REQUEST_S = 0.5
"""How long a connection without a request is still read when the server drains: one may be on its way."""
SEPARATOR_BYTES = len(": \r\n")


class _Stop(Exception):
    """Stops the parser from inside a callback."""


@dataclass(frozen=True)
class HttpFront:
    table: ConnectionTable[BoundedHttp]
    trusted_proxies: tuple[Network, ...]
    metrics: Metrics
    refused: Callable[[ApiError, str], None]
    admin: AdminListener | None = None
    """None: there is one listener."""
    admin_table: ConnectionTable[BoundedHttp] | None = None
    """The admin listener's own places, which no flood of the public one takes; None: shared."""
    sibling_table: ConnectionTable[BoundedHttp] | None = None
    """Of other workers of the port, which ask over a socket of this one's own; None: there are none."""

    def table_of(self, *, is_admin: bool, is_sibling: bool) -> ConnectionTable[BoundedHttp]:
        if is_sibling and self.sibling_table is not None:
            return self.sibling_table
        return self.admin_table if is_admin and self.admin_table is not None else self.table

    def note_connections(self) -> None:
        more = 0 if self.admin_table is None else len(self.admin_table)
        self.metrics.connections(len(self.table) + more)

    def sweep(self, now_s: float) -> None:
        """Ends connections that rest for too long. Call once or twice a second."""
        for table in (self.table, self.admin_table, self.sibling_table):
            for connection in () if table is None else table.overdue(now_s):
                connection.expire()


class JoinedWrites:
    """Sends an answer's head together with what follows in the same loop iteration: one system call."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""
        self.is_closing = transport.is_closing
        self.abort = transport.abort

    def write(self, data: bytes) -> None:
        """Sends `data`; a head waits for the next piece, or for the loop's next iteration."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        elif data.startswith(b"HTTP/1.1 "):
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def write_eof(self) -> None:
        self._flush()
        self._transport.write_eof()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            self.write(b"")


class BoundedHttp(HttpToolsProtocol):
    def __init__(
        self,
        front: HttpFront,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._front = front
        self._table = front.table
        self._limits = front.table.limits
        self._max_head_bytes = self._limits.max_head_bytes
        self._max_headers = self._limits.max_headers
        self._gateway_app = self.app
        self.app = self._answer
        self._is_admin = self._is_sibling = False
        self._is_proxy = False
        self._is_known = False
        """It has sent a request with a valid key, or with a console session."""
        self._is_deaf = False
        self._drains = False
        """The next request is its last."""
        self._in_head = False
        self._is_upgrade = False
        self._head_is_timed = False
        self._head_bytes = 0
        """Of this request's URL, headers and trailers, as reported by the parser."""
        self._unreported_bytes = 0
        """Given to the parser since it last reported anything."""

    # ------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = JoinedWrites(transport, self.loop)  # type: ignore[assignment]
        accepted_by = transport.get_extra_info("socket")
        self._is_sibling = accepted_by is not None and accepted_by.family == socket.AF_UNIX
        self._is_admin = self._front.admin is not None and self._front.admin.accepted(self.server)
        self._table = self._front.table_of(is_admin=self._is_admin, is_sibling=self._is_sibling)
        address = address_of(self.client[0]) if self.client else None
        self._is_proxy = address is not None and is_within(address, self._front.trusted_proxies)
        counted = UNCOUNTED if self._is_proxy else counted_as(address)
        try:
            displaced = self._table.enter(self, counted, self.loop.time() + self._limits.idle_timeout_s)
        except ApiError as refusal:
            self._is_deaf = True
            self._write(refusal)
            self.transport.close()
            return
        if displaced is not None:
            displaced.end("displaced")
        self._front.note_connections()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.leave(self)
        self._front.note_connections()
        super().connection_lost(exc)

    def end(self, cause: str) -> None:
        """`cause` (idle, displaced) is for the metrics."""
        self._front.metrics.connection_closed(cause)
        self._is_deaf = True
        self.transport.abort()

    def shutdown(self) -> None:
        self._drains = True
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(LAST_REQUEST_S, super().shutdown)
        elif not self.cycle.response_started:
            super().shutdown()

    def expire(self) -> None:
        """Ends a connection that has rested too long: with 408 within a head, else without an answer."""
        if self._in_head:
            self._refuse(errors.head_too_slow(timeout_s=self._limits.head_timeout_s))
        else:
            self.end("idle")

    # ------------------------------------------------------------ what arrives

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        while data:
            self._unreported_bytes += len(data)
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserError:
                if not self._is_deaf:  # otherwise we stopped the parser
                    self._refuse(errors.malformed_http())
                return
        if self._unreported_bytes > self._max_head_bytes:
            self._refuse_head()
        elif self._in_head and not self._head_is_timed:
            self._head_is_timed = True
            until_s = self.loop.time() + self._limits.head_timeout_s
            self._table.rest(self, until_s, is_known=self._is_known)

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_listening()
            raise _Stop
        self._in_head, self._head_is_timed = True, False
        self._head_bytes = self._unreported_bytes = 0
        super().on_message_begin()
        self.scope["state"][FIRST_BYTE] = time.monotonic()

    def on_url(self, url: bytes) -> None:
        self._unreported_bytes = 0
        self._head_bytes += len(url)
        if self._head_bytes > self._max_head_bytes:
            self._refuse_head()
            raise _Stop
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A trailer is counted and dropped (RFC 9110, 6.5.1: it must not become a header)."""
        # Called for each of them: without calls of its own.
        self._unreported_bytes = 0
        self._head_bytes += len(name) + len(value) + SEPARATOR_BYTES
        if self._head_bytes > self._max_head_bytes or len(self.headers) >= self._max_headers:
            self._refuse_head()
            raise _Stop
        if self._in_head:
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise _Stop  # we are no proxy
            self._is_upgrade = True
            return
        self._in_head = False
        self._table.work(self)
        super().on_headers_complete()
        if self._drains:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._unreported_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unreported_bytes = 0
        if not self._is_upgrade:
            super().on_message_complete()

    def _head_without_upgrade(self) -> bytes:
        """The head without Upgrade, which may be ignored (RFC 9110, 7.8): with it no body would be read."""
        self._is_upgrade = False
        lines = [
            b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        ]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    # ------------------------------------------------------------ what is answered

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application. Requests through a trusted proxy are limited by address."""
        cycle, address = self.cycle, UNCOUNTED
        try:
            if self._is_sibling:
                _pass_on(scope)
            elif self._front.admin is not None:
                require_listener(scope["path"], is_admin=self._is_admin)
            if self._is_proxy:
                found = counted_as(client_of(scope, self._front.trusted_proxies))
                self._table.take(found, through_proxy=True)
                address = found
            await self._gateway_app(scope, receive, send)
        except ApiError as refusal:
            request_id = begin(scope)
            self._front.refused(refusal, request_id)
            headers = refusal.all_headers() | {"x-request-id": request_id}
            body = messages.refused(refusal, request_id, scope["path"])
            await send_json(send, refusal.status, body, encode_headers(headers))
        finally:
            if address is not UNCOUNTED:
                self._table.give_back(address)
            if not cycle.response_complete:
                # It is closed now; a client that does not read would keep it open.
                self._rest(LINGER_S)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        state = self.scope["state"]
        self._is_known = self._is_known or "principal" in state or "is_signed_in" in state
        self._rest(self._limits.idle_timeout_s)
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self._drains:  # the answer's head did not say that it was the last
                self.shutdown()

    def _rest(self, seconds: float) -> None:
        self._table.rest(self, self.loop.time() + seconds, is_known=self._is_known)

    def _refuse_head(self) -> None:
        limits = self._limits
        self._refuse(
            errors.head_too_large(max_head_bytes=limits.max_head_bytes, max_headers=limits.max_headers)
        )

    def _refuse(self, error: ApiError) -> None:
        cycle = self.cycle
        is_running = cycle is not None and not cycle.response_complete
        if is_running and not cycle.more_body:
            self._stop_listening()
            return
        if is_running:  # what it waits for will not come
            cycle.disconnected = True
            cycle.message_event.set()
        self._is_deaf, self._in_head = True, False
        if self.transport.is_closing():
            return
        if not (is_running and cycle.response_started):
            self._write(error)
        self._rest(LINGER_S)
        self.flow.resume_reading()
        self.transport.write_eof()

    def _stop_listening(self) -> None:
        self._is_deaf = True
        self.cycle.keep_alive = False

    def _write(self, error: ApiError) -> None:
        request_id = new_request_id(time.time())
        self._front.refused(error, request_id)
        body = error.body()
        headers = error.all_headers() | {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": request_id,
        }
        lines = [b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode())]
        lines += [
            b"%s: %s" % header for header in (*self.server_state.default_headers, *encode_headers(headers))
        ]
        self.transport.write(b"\r\n".join([*lines, b"", body]))


def _pass_on(scope: Scope) -> None:
    """Another worker's request, or one that it passes on for a client."""
    scope["state"][SIBLING] = True
    client = dict(scope["headers"]).get(CLIENT.encode(), b"").decode("latin-1")
    scope["client"] = (client, 0) if client else None
