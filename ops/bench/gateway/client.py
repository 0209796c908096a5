"""Load client of the gateway benchmark: closed loops over kept connections, in one process.

One epoll loop on plain sockets and prepared requests: cheaper than any gateway. Each connection sends its
next request when it has its whole answer, until the time is over; then the open requests are waited for.

One order on stdin, one answer on stdout, both JSON:
    {"port": 8000, "requests": ["POST …"], "connections": 32, "seconds": 3.0, "stream": false, "tokens": 64}
    -> {"requests": 9000, "requests_in_time": 8970, "tokens_in_time": 574080, "events": 0, "errors": 0,
        "cpu_s": 1.9, "cpu_share": 0.61, …}
`cpu_s` is the process's whole processor time, `cpu_share` its share of one core under load.
"""

from __future__ import annotations

import gc
import json
import re
import select
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from ops.bench.gateway.mock_upstream import MARK
from ops.reporting import plain, quantile

READ_BYTES = 262_144
DRAIN_S = 60.0
MAX_ERRORS = 20
SHOWN_BYTES = 400

_MARK = MARK.encode()
_EVENT = b"data: {"
_END = b"\r\n0\r\n\r\n"
_TAIL_BYTES = 8
"""No shorter than any of the three, less one."""
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:\s*chunked", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection:\s*close", re.IGNORECASE)


class HttpReply:
    __slots__ = ("_head", "_needed", "_tail", "closes", "events", "shown", "status", "tokens")

    def __init__(self) -> None:
        self._head: bytes | None = b""
        """None: it is complete and parsed."""
        self._needed = 0
        """Bytes that are missing; -1: it is chunked."""
        self._tail = b""
        self.status = 0
        self.tokens = 0
        self.events = 0
        self.closes = False
        self.shown = b""
        """Start of the body of an answer that is no success."""

    @property
    def is_new(self) -> bool:
        return self._head == b""

    @property
    def is_chunked(self) -> bool:
        return self._needed < 0

    def receive(self, data: bytes) -> bool:
        """Takes received bytes; True: the response is complete. Raises `ValueError` for no response."""
        if self._head is not None:
            data = self._parse_head(self._head + data)
            if self._head is not None:
                return False
        if self.status != 200 and len(self.shown) < SHOWN_BYTES:
            self.shown += data[:SHOWN_BYTES]
        tail = self._tail
        whole = tail + data
        # Marks that lie in the tail as a whole have been counted.
        self.tokens += whole.count(_MARK) - tail.count(_MARK)
        self.events += whole.count(_EVENT) - tail.count(_EVENT)
        self._tail = whole[-_TAIL_BYTES:]
        if self._needed < 0:
            return whole.endswith(_END)
        self._needed -= len(data)
        return self._needed <= 0

    def _parse_head(self, data: bytes) -> bytes:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._head = data
            return b""
        if not data.startswith(b"HTTP/1.1 "):
            raise ValueError(f"no HTTP/1.1 response: {data[:80]!r}")
        self._head = None
        self.status = int(data[9:12])
        self.closes = _CLOSES.search(data, 0, end + 2) is not None
        length = _LENGTH.search(data, 0, end)
        if length is not None:
            self._needed = int(length[1])
        elif _CHUNKED.search(data, 0, end):
            self._needed = -1
            # The end of the head may begin the end of an empty body.
            self._tail = b"\r\n"
        else:
            raise ValueError("a response with neither a length nor chunks")
        return data[end + 4 :]


class _ClientConnection:
    __slots__ = ("first_s", "is_open", "reply", "request", "sent_s", "socket")

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.socket = socket.socket()
        self.reply = HttpReply()
        self.sent_s = self.first_s = 0.0
        self.is_open = False


@dataclass
class Seen:
    requests: int = 0
    requests_in_time: int = 0
    tokens: int = 0
    tokens_in_time: int = 0
    events: int = 0
    """Server-sent events of all streams: fewer than tokens where a gateway joins some."""
    errors: int = 0
    first_error: str = ""
    latencies_s: list[float] = field(default_factory=list)
    first_tokens_s: list[float] = field(default_factory=list)


class ClosedLoops:
    def __init__(self, order: dict[str, Any]) -> None:
        self._address = ("127.0.0.1", order["port"])
        self._seconds = order["seconds"]
        self._tokens = order["tokens"]
        requests = [request.encode() for request in order["requests"]]
        self._connections = [
            _ClientConnection(requests[number % len(requests)]) for number in range(order["connections"])
        ]
        self._epoll = select.epoll()
        self._by_number: dict[int, _ClientConnection] = {}
        self._end_s = 0.0
        self._usual_bytes = 0
        """Of the last response that came in one piece."""
        self.seen = Seen()

    def run(self) -> float:
        """Returns the seconds until the end of the last answer."""
        for connection in self._connections:
            self._connect(connection)
        started_s = time.perf_counter()
        self._end_s = started_s + self._seconds
        for connection in self._connections:
            self._send(connection)
        while self._by_number:
            for number, _ in self._epoll.poll(1.0):
                self._receive(self._by_number[number])
            if time.perf_counter() > self._end_s + DRAIN_S:
                self._fail(f"{len(self._by_number)} answers did not come within {DRAIN_S:g} s")
                break
        return time.perf_counter() - started_s

    def _connect(self, connection: _ClientConnection) -> None:
        connection.socket = socket.create_connection(self._address, timeout=10.0)
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.is_open = True
        self._by_number[connection.socket.fileno()] = connection
        self._epoll.register(connection.socket, select.EPOLLIN)

    def _close(self, connection: _ClientConnection) -> None:
        number = connection.socket.fileno()
        self._epoll.unregister(number)
        del self._by_number[number]
        connection.socket.close()
        connection.is_open = False

    def _send(self, connection: _ClientConnection) -> None:
        if not connection.reply.is_new:
            connection.reply = HttpReply()
        connection.first_s = 0.0
        if not connection.is_open:
            self._connect(connection)
        connection.sent_s = time.perf_counter()
        connection.socket.sendall(connection.request)

    def _receive(self, connection: _ClientConnection) -> None:
        reply, seen = connection.reply, self.seen
        try:
            data = connection.socket.recv(READ_BYTES)
        except OSError:
            data = b""
        now_s = time.perf_counter()
        if not data:
            self._fail("the gateway closed a connection before its answer was complete")
            self._close(connection)
            self._go_on(connection, now_s)
            return
        if reply.is_new and self._is_usual(data):
            self._finished_as_usual(connection, now_s)
            return
        was_new, before = reply.is_new, reply.tokens
        try:
            is_complete = reply.receive(data)
        except ValueError as error:
            self._fail(str(error))
            self._close(connection)
            return
        if reply.tokens != before:
            if not before:
                connection.first_s = now_s
            seen.tokens += reply.tokens - before
            if now_s <= self._end_s:
                seen.tokens_in_time += reply.tokens - before
        if is_complete:
            if was_new and not reply.closes and not reply.is_chunked and reply.status == 200:
                self._usual_bytes = len(data)
            self._finished(connection, now_s)

    def _is_usual(self, data: bytes) -> bool:
        """A whole response as long as the last one: most are, and need no parsing."""
        return (
            len(data) == self._usual_bytes
            and data.startswith(b"HTTP/1.1 200 ")
            and data.count(_MARK) == self._tokens
        )

    def _finished_as_usual(self, connection: _ClientConnection, now_s: float) -> None:
        seen, connection.first_s = self.seen, now_s
        seen.tokens += self._tokens
        seen.tokens_in_time += self._tokens * (now_s <= self._end_s)
        self._answered(connection, now_s)
        self._go_on(connection, now_s)

    def _answered(self, connection: _ClientConnection, now_s: float) -> None:
        seen = self.seen
        seen.requests += 1
        seen.requests_in_time += now_s <= self._end_s
        seen.latencies_s.append(now_s - connection.sent_s)
        seen.first_tokens_s.append(connection.first_s - connection.sent_s)

    def _finished(self, connection: _ClientConnection, now_s: float) -> None:
        reply = connection.reply
        if reply.status != 200:
            self._fail(f"status {reply.status}: {reply.shown.decode(errors='replace')}")
        elif reply.tokens != self._tokens:
            self._fail(f"an answer had {reply.tokens} tokens instead of {self._tokens}")
        else:
            self.seen.events += reply.events
            self._answered(connection, now_s)
        if reply.closes:
            self._close(connection)
        self._go_on(connection, now_s)

    def _go_on(self, connection: _ClientConnection, now_s: float) -> None:
        if now_s < self._end_s and self.seen.errors < MAX_ERRORS:
            self._send(connection)
        elif connection.is_open:
            self._close(connection)

    def _fail(self, why: str) -> None:
        self.seen.errors += 1
        self.seen.first_error = self.seen.first_error or why


def main() -> None:
    order = json.loads(sys.stdin.read())
    load = ClosedLoops(order)
    # A collection would be a pause in a request's latency; nothing here makes cycles.
    gc.disable()
    begun_s = time.process_time()
    wall_s = load.run()
    cpu_share = (time.process_time() - begun_s) / wall_s
    seen = load.seen
    answer = {name: value for name, value in vars(seen).items() if not name.endswith("_s")}
    answer |= {
        "seconds": order["seconds"],
        "wall_s": wall_s,
        "cpu_s": time.process_time(),
        "cpu_share": cpu_share,
        "latency_s": _points(seen.latencies_s),
        "first_token_s": _points(seen.first_tokens_s),
    }
    json.dump(answer, sys.stdout)


def _points(values_s: list[float]) -> dict[str, float | None]:
    return {name: plain(quantile(values_s, share)) for name, share in (("p50", 0.5), ("p99", 0.99))}


if __name__ == "__main__":
    main()
