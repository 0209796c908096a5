"""HTTP/1.1 client of the benchmarks' loads: asyncio streams, kept connections, server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

CONNECT_S = 15.0
READ_BYTES = 65_536

T = TypeVar("T")


class HttpBroken(Exception):
    """The connection failed, was silent for too long, or carried no HTTP/1.1 response."""


@dataclass(slots=True, eq=False)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class HttpResponse:
    def __init__(self, head: bytes, reader: asyncio.StreamReader, timeout_s: float) -> None:
        status, *lines = head.decode("latin-1").split("\r\n")
        if not status.startswith("HTTP/1.1 "):
            raise HttpBroken(f"no HTTP/1.1 response: {status[:80]!r}")
        self.status = int(status[9:12])
        self.headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name
        }
        self._reader = reader
        self._timeout_s = timeout_s
        self.is_read = False

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    async def read(self) -> bytes:
        """The whole body. Raises `HttpBroken`."""
        return b"".join([part async for part in self.parts()])

    async def lines(self) -> AsyncIterator[str]:
        """The body's lines as they arrive, without their ends. Raises `HttpBroken`."""
        rest = b""
        async for part in self.parts():
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                yield line.removesuffix(b"\r").decode()
        if rest:
            yield rest.decode()

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises `HttpBroken`."""
        reader = self._reader
        keeps = self.headers.get("connection", "").lower() != "close"
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            size = -1
            while size:
                size, part = await within(self._timeout_s, _chunk(reader))
                yield part
        elif "content-length" in self.headers:
            yield await within(self._timeout_s, reader.readexactly(int(self.headers["content-length"])))
        else:
            keeps = False
            while part := await within(self._timeout_s, reader.read(READ_BYTES)):
                yield part
        self.is_read = keeps


async def _chunk(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    size = int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16)
    return size, (await reader.readexactly(size + 2))[:-2]


async def within(timeout_s: float, work: Awaitable[T]) -> T:
    """Raises `HttpBroken` where `work` fails or takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:  # TimeoutError is an OSError
        raise HttpBroken(f"{type(error).__name__}: {error}") from None


class LoadHttpClient:
    """Any number of connections to any number of servers, kept for the next request."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        """Most between two pieces of a response."""
        self._idle: dict[tuple[str, int], list[_Connection]] = {}

    @contextlib.asynccontextmanager
    async def post(
        self, url: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[HttpResponse]:
        """A response that is not read to its end closes its connection. Raises `HttpBroken`."""
        target = urlsplit(url)
        address = (target.hostname or "", target.port or 80)
        lines = [f"POST {target.path} HTTP/1.1", f"host: {target.netloc}", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode()
        connection = await self._connect(address)
        response = None
        try:
            connection.writer.write(head + body)
            await within(self._timeout_s, connection.writer.drain())
            start = await within(self._timeout_s, connection.reader.readuntil(b"\r\n\r\n"))
            response = HttpResponse(start[:-4], connection.reader, self._timeout_s)
            yield response
        finally:
            if response is not None and response.is_read:
                self._idle.setdefault(address, []).append(connection)
            else:
                connection.writer.close()

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.writer.close()
        self._idle.clear()

    async def _connect(self, address: tuple[str, int]) -> _Connection:
        idle = self._idle.get(address, [])
        while idle:
            connection = idle.pop()
            if not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.writer.close()
        reader, writer = await within(CONNECT_S, asyncio.open_connection(*address))
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _Connection(reader, writer)
