"""Asks the other workers of the port over their own sockets, each for what it alone has."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

import httpx

from gateway.workers.seat import Seat

ANSWER_S = 1.0
PASSED_ON_S = 60.0
WORKER = "worker"
"""In a query: the number of the one that shall answer."""
CLIENT = "x-fairgate-client"
"""Between workers: the address of the client whose request is passed on."""


class Siblings:
    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    async def ask(self, path: str) -> dict[int, httpx.Response]:
        """By seat: what those that live and answer within `ANSWER_S` have of their own."""
        numbers = [number for number in range(self._seat.count + 1) if number != self._seat.number]
        found = await asyncio.gather(*(self._own(number, path) for number in numbers))
        return {each: answer for each, answer in zip(numbers, found, strict=True) if answer is not None}

    async def _own(self, number: int, path: str) -> httpx.Response | None:
        headers = {"authorization": f"Bearer {self._seat.control_token}"}
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self.send(number, "GET", path, headers)
        except (httpx.HTTPError, TimeoutError):
            return None

    async def send(
        self, number: int, method: str, path: str, headers: Mapping[str, str], body: str = ""
    ) -> httpx.Response | None:
        """None: it does not live. Raises `httpx.HTTPError` where it may have acted."""
        # No connection is kept: the one to a worker that was replaced would fail.
        transport = httpx.AsyncHTTPTransport(uds=str(self._seat.socket_of(number)), verify=_NO_TLS)
        headers = {"accept-encoding": "identity", **headers}
        async with httpx.AsyncClient(transport=transport, timeout=PASSED_ON_S) as client:
            try:
                return await client.request(method, f"http://worker{path}", headers=headers, content=body)
            except httpx.ConnectError:
                return None


_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""None speaks it, and a context that loads certificates takes as long as the request."""
