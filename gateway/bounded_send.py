"""How long may a client take to read what is written to it?"""

from __future__ import annotations

from gateway.waiting import within
from gateway.wire import EncodedHeaders, Send, send_json


class BoundedSend:
    """`send` that a client who reads nothing cannot hold for ever: raises `TimeoutError`."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s

    async def __call__(self, message: object) -> None:
        await within(self._timeout_s, self._send(message))

    async def json(self, status: int, body: bytes, headers: EncodedHeaders) -> None:
        """A whole JSON answer."""
        await send_json(self, status, body, headers)
