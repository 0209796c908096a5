"""One HTTP/1.1 connection of the client: parses responses at the least cost per read.

On `httptools`: data goes from the socket through the parser to its reader in one call, without a task, a
queue or a timer. All of a body that one read of the socket brought reaches the reader in one piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol, cast

import httptools

MAX_HEADERS = 128
MAX_HEADER_BYTES = 64 * 1024
"""Of a head including its 1xx answers; of trailers; of a chunk's size and extensions."""
HEAD_S = 10.0
"""From the first byte of a head to its end."""
IDLE_S = 20.0
"""A connection idle for longer is not used again: servers close theirs some seconds later."""


class Reader(Protocol):
    """Gets one response: `head`, any `body`, then `end`; or at any time `lost`. Nothing follows these two."""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Header names are in lower case."""
        ...

    def body(self, data: bytes) -> None: ...

    def end(self) -> None: ...

    def lost(self, reason: str) -> None:
        """The connection ended before the response did."""
        ...


class ConnectionOwner(Protocol):
    def released(self, connection: Connection) -> None:
        """A connection's response is complete, and it may be used again."""
        ...

    def gone(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    def __init__(self, pool: ConnectionOwner) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reader: Reader | None = None
        self._headers: dict[str, str] = {}
        self._num_headers = self._header_bytes = 0
        """Of the current response, including 1xx answers and trailers."""
        self._bare_bytes = 0
        """Received since the request was sent, or since the last byte of its body: the parser keeps some."""
        self._is_in_head = False
        self._head_timer: asyncio.TimerHandle | None = None
        """Runs if a head comes in several reads."""
        self._pieces: list[bytes] = []
        """Of the body, from the current read."""
        self._has_body = False
        """The current read brought some of the body, or the end of a response."""
        self._until_close = False
        self._is_kept = False
        self._is_gone = False
        self._idle_since_s = 0.0
        self._is_paused = False

    # ------------------------------------------------------------ used by the pool and readers

    def is_usable(self, now_s: float) -> bool:
        return (
            not self._is_gone
            and self._transport is not None
            and not self._transport.is_closing()
            and now_s - self._idle_since_s < IDLE_S
        )

    def send(self, request: bytes, reader: Reader) -> None:
        assert self._transport is not None
        assert self._reader is None, "one response at a time"
        self._reader = reader
        self._bare_bytes = self._num_headers = self._header_bytes = 0
        self._transport.write(request)
        if self._is_gone:
            self._lose("the connection was closed")

    def abort(self) -> None:
        """Ends the connection immediately, without a call to its reader."""
        self._reader = None
        self._stop_head_timer()
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Stops reading, as its reader has no room; TCP then slows the server."""
        if not self._is_paused and self._transport is not None and not self._is_gone:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and self._transport is not None and not self._is_gone:
            self._is_paused = False
            self._transport.resume_reading()

    # ------------------------------------------------------------ asyncio's protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not of that class

    def data_received(self, data: bytes) -> None:
        if self._reader is None:
            self.abort()  # no request was sent
            return
        self._has_body = False
        try:
            self._parser.feed_data(data)
            self._hand_over()
            self._bare_bytes = 0 if self._has_body else self._bare_bytes + len(data)
            if self._bare_bytes > MAX_HEADER_BYTES:
                self._lose(f"it sent {self._bare_bytes} bytes of headers or chunk sizes without any content")
            elif self._is_in_head and self._head_timer is None:
                self._head_timer = asyncio.get_running_loop().call_later(HEAD_S, self._head_is_late)
        except httptools.HttpParserError:
            self._hand_over()
            self._lose("what it sent is not HTTP")
        except Exception as error:
            # An exception of the reader must end the connection, too.
            self._lose(f"its answer could not be read: {type(error).__name__}")
            raise

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_gone = True
        self._stop_head_timer()
        self._pool.gone(self)
        if self._reader is None:
            return
        if exc is None and self._until_close:
            reader, self._reader = self._reader, None
            reader.end()
        else:
            self._lose("the connection was closed")

    # ------------------------------------------------------------ the parser's callbacks

    def on_message_begin(self) -> None:
        self._headers = {}
        self._is_in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._header_bytes += len(name) + len(value)
        if self._num_headers > MAX_HEADERS or self._header_bytes > MAX_HEADER_BYTES:
            raise httptools.HttpParserError("too many headers")
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_head_timer()
        status = self._parser.get_status_code()
        if status < 200:
            return  # 100 Continue and its like: the response follows
        self._is_kept = self._parser.should_keep_alive()
        self._until_close = "content-length" not in self._headers and "chunked" not in self._headers.get(
            "transfer-encoding", ""
        )
        if self._reader is not None:
            self._reader.head(status, self._headers)

    def on_body(self, body: bytes) -> None:
        self._has_body = True
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return
        self._has_body = True
        self._hand_over()
        reader, self._reader = self._reader, None
        self._until_close = False
        if reader is None:
            self.abort()  # an answer that was not asked for, or is no longer wanted
            return
        if self._is_kept and not self._is_gone and self._transport is not None:
            self.resume()
            self._idle_since_s = asyncio.get_running_loop().time()
            self._pool.released(self)
        elif self._transport is not None:
            self._transport.close()
        reader.end()

    # ------------------------------------------------------------ inside

    def _head_is_late(self) -> None:
        self._head_timer = None
        self._lose(f"its head was not complete after {HEAD_S:g} s")

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _hand_over(self) -> None:
        """Passes on what this read brought of the body, in one piece."""
        if not self._pieces:
            return
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if self._reader is not None:
            self._reader.body(data)

    def _lose(self, reason: str) -> None:
        reader, self._reader = self._reader, None
        self._pieces.clear()
        self._stop_head_timer()
        if self._transport is not None and not self._is_gone:
            self._transport.abort()
        if reader is not None:
            reader.lost(reason)
