"""Upstream of the gateway benchmark: answers immediately, and always the same, from one epoll loop.

All open streams get their next chunk in turn. With a single stream this process yields its core, as if it
were another machine. Several may listen on one port. A process ends when its stdin does.

    python -m ops.bench.gateway.mock_upstream PORT     (0: a free one)  ->  prints the port
"""

from __future__ import annotations

import gc
import json
import os
import re
import select
import socket
import sys
from typing import Any

MODEL = "bench-model"
MARK = "~zq~"
"""Once in each token, and in no identifier: tokens can be counted in the output of any gateway."""
MAX_TOKENS = 64
CONTEXT_TOKENS = 32_768
READ_BYTES = 262_144
BACKLOG = 1024
CREATED = 1_700_000_000
PROMPT_TOKENS = 40

_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:\s*chunked", re.IGNORECASE)
_MAX_TOKENS = re.compile(rb'"max(?:_completion)?_tokens"\s*:\s*(\d+)')
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_LAST_CHUNK = b"0\r\n\r\n"


def request_length(data: bytes) -> int | None:
    """Bytes of the request that `data` begins with, body included; None: not all of it is there."""
    head = data.find(b"\r\n\r\n")
    if head < 0:
        return None
    match = _LENGTH.search(data, 0, head)
    if match is not None:
        length = head + 4 + int(match[1])
    elif _CHUNKED.search(data, 0, head):
        # A client that sends no length sends nothing more before it has its answer.
        length = len(data) if data.endswith(_LAST_CHUNK) else sys.maxsize
    else:
        length = head + 4
    return length if length <= len(data) else None


def asked_tokens(body: bytes) -> int:
    match = _MAX_TOKENS.search(body)
    return min(int(match[1]), MAX_TOKENS) if match is not None else MAX_TOKENS


def whole_answer(tokens: int) -> bytes:
    message = {"role": "assistant", "content": (MARK + " ") * tokens}
    return _answer(
        {
            "id": "chatcmpl-bench",
            "object": "chat.completion",
            "created": CREATED,
            "model": MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
            "usage": _usage(tokens),
        }
    )


def stream_pieces(tokens: int) -> list[bytes]:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    pieces = [_chunk(_event({"content": MARK + " "})) for _ in range(tokens)]
    pieces[0] = head + _chunk(_event({"role": "assistant", "content": MARK + " "}))
    usage = {"choices": [], "usage": _usage(tokens)}
    last = _event({}, finish_reason="length") + _sse(_envelope() | usage) + b"data: [DONE]\n\n"
    pieces.append(_chunk(last) + _LAST_CHUNK)
    return pieces


def models_answer() -> bytes:
    model = {"id": MODEL, "object": "model", "created": CREATED, "owned_by": "bench"}
    return _answer({"object": "list", "data": [model | {"max_model_len": CONTEXT_TOKENS}]})


def _answer(value: dict[str, Any]) -> bytes:
    body = json.dumps(value, separators=(",", ":")).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _envelope() -> dict[str, Any]:
    return {"id": "chatcmpl-bench", "object": "chat.completion.chunk", "created": CREATED, "model": MODEL}


def _event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    return _sse(_envelope() | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _usage(tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": tokens,
        "total_tokens": PROMPT_TOKENS + tokens,
    }


class _ServedConnection:
    __slots__ = ("pieces", "place", "socket", "unread", "unsent")

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.unread = b""
        self.unsent = b""
        self.pieces: list[bytes] = []
        self.place = 0


class MockUpstream:
    def __init__(self, port: int) -> None:
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._listener.bind(("127.0.0.1", port))
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._epoll.register(sys.stdin, select.EPOLLIN)
        self._connections: dict[int, _ServedConnection] = {}
        self._streaming: dict[int, _ServedConnection] = {}
        self._whole = {tokens: whole_answer(tokens) for tokens in range(1, MAX_TOKENS + 1)}
        self._streams = {tokens: stream_pieces(tokens) for tokens in range(1, MAX_TOKENS + 1)}
        self._models = models_answer()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def run(self) -> None:
        listening, stdin = self._listener.fileno(), sys.stdin.fileno()
        while True:
            for number, events in self._epoll.poll(0 if self._streaming else -1):
                if number == listening:
                    self._accept()
                elif number == stdin:
                    return
                elif events & select.EPOLLOUT:
                    self._send_rest(self._connections[number])
                else:
                    self._receive(self._connections[number])
            for connection in list(self._streaming.values()):
                if not connection.unsent:
                    self._next_piece(connection)
            if len(self._streaming) == 1:
                os.sched_yield()

    def _accept(self) -> None:
        accepted, _ = self._listener.accept()
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[accepted.fileno()] = _ServedConnection(accepted)
        self._epoll.register(accepted, select.EPOLLIN)

    def _receive(self, connection: _ServedConnection) -> None:
        try:
            data = connection.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        data = connection.unread + data
        length = request_length(data)
        if length is None:
            connection.unread = data
            return
        connection.unread = data[length:]
        if not data.startswith(b"POST"):
            self._send(connection, self._models)
        elif _STREAM.search(data, 0, length):
            connection.pieces, connection.place = self._streams[asked_tokens(data[:length])], 0
            self._streaming[connection.socket.fileno()] = connection
        else:
            self._send(connection, self._whole[asked_tokens(data[:length])])

    def _next_piece(self, connection: _ServedConnection) -> None:
        piece = connection.pieces[connection.place]
        connection.place += 1
        if connection.place == len(connection.pieces):
            del self._streaming[connection.socket.fileno()]
        self._send(connection, piece)

    def _send(self, connection: _ServedConnection, data: bytes) -> None:
        try:
            sent = connection.socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(connection)
            return
        if sent < len(data):
            connection.unsent = data[sent:]
            self._epoll.modify(connection.socket, select.EPOLLIN | select.EPOLLOUT)

    def _send_rest(self, connection: _ServedConnection) -> None:
        data, connection.unsent = connection.unsent, b""
        self._epoll.modify(connection.socket, select.EPOLLIN)
        self._send(connection, data)

    def _drop(self, connection: _ServedConnection) -> None:
        number = connection.socket.fileno()
        self._streaming.pop(number, None)
        if self._connections.pop(number, None) is not None:
            self._epoll.unregister(number)
            connection.socket.close()


def main() -> None:
    upstream = MockUpstream(int(sys.argv[1]))
    print(upstream.port, flush=True)
    # Nothing here makes cycles, and a collection would be a pause in a request's latency.
    gc.disable()
    upstream.run()


if __name__ == "__main__":
    main()
