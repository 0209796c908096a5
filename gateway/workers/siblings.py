"""Asks the other workers of the port over their own sockets, each for what it alone has."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from gateway.workers.seat import Seat

ANSWER_S = 1.0
WORKER, OWN = "worker", "own"
"""In a query: `worker=own` is answered without asking others."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class Siblings:
    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    async def ask(self, path: str, **query: str) -> dict[int, Answer]:
        """By seat: of those that live and answer within `ANSWER_S`."""
        numbers = [number for number in range(self._seat.count + 1) if number != self._seat.number]
        found = await asyncio.gather(
            *(self.ask_one(number, path, {WORKER: OWN, **query}) for number in numbers)
        )
        return {number: answer for number, answer in zip(numbers, found, strict=True) if answer is not None}

    async def ask_one(self, number: int, path: str, query: Mapping[str, str]) -> Answer | None:
        """None: it does not live, or does not answer."""
        socket = self._seat.socket_of(number)
        if not socket.exists():
            return None
        # No connection is kept: the one to a worker that was replaced would fail.
        transport = httpx.AsyncHTTPTransport(uds=str(socket), verify=_NO_TLS)
        headers = {"authorization": f"Bearer {self._seat.control_token}", "accept-encoding": "identity"}
        try:
            async with (
                asyncio.timeout(ANSWER_S),
                httpx.AsyncClient(transport=transport, base_url="http://worker", headers=headers) as client,
            ):
                found = await client.get(path, params=dict(query))
        except (httpx.HTTPError, OSError, TimeoutError):
            return None
        return Answer(found.status_code, found.content)


_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""None speaks it, and a context that loads certificates takes as long as the request."""
