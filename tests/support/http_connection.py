"""HTTP connections to the gateway's protocol without sockets: asyncio's transport, in memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from gateway.http.admin_listener import AdminListener
from gateway.http.bounded_http import BoundedHttp, HttpFront
from gateway.http.connection_table import ConnectionLimits, ConnectionTable
from gateway.metrics.registry import Metrics
from tenants.networks import Network

LIMITS = ConnectionLimits(
    max_connections=100, max_per_address=100, max_head_bytes=2_048, max_headers=16, head_timeout_s=10.0,
    idle_timeout_s=30.0,
)  # fmt: skip


class MemoryTransport(asyncio.Transport):
    """Keeps what is written; strict as uvloop's about writes to what is closed."""

    def __init__(self, address: str, port: int = 8000) -> None:
        super().__init__({"peername": (address, 5123), "sockname": ("127.0.0.1", port)})
        self.written = bytearray()
        self.protocol: BoundedHttp | None = None
        self.has_written_eof = False
        self.is_reading_now = True
        self._is_closing = False

    def write(self, data: Any) -> None:
        if self._is_closing or self.has_written_eof:
            raise RuntimeError("the transport is closed")
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_written_eof = True

    def pause_reading(self) -> None:
        self.is_reading_now = False

    def resume_reading(self) -> None:
        self.is_reading_now = True

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            assert self.protocol is not None
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with what it read."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    answer = b"%s %s %s" % (scope["method"].encode(), scope["path"].encode("utf-8", "replace"), body)
    headers = [(b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer, "more_body": False})


@dataclass
class HttpHouse:
    """What connections share, and an application behind them."""

    limits: ConnectionLimits = LIMITS
    trusted: tuple[Network, ...] = ()
    application: Any = echo
    metrics: Metrics = field(default_factory=Metrics)
    admin_port: int | None = None
    """Of an admin listener."""

    def __post_init__(self) -> None:
        self.table: ConnectionTable[BoundedHttp] = ConnectionTable(self.limits)
        self.front = HttpFront(
            self.table,
            self.trusted,
            self.metrics,
            lambda error, _request_id: self.metrics.refused(error.code),
        )
        if self.admin_port is not None:
            admin = AdminListener("127.0.0.1", self.admin_port)
            self.front = replace(self.front, admin=admin, admin_table=ConnectionTable(self.limits))
        self.config = uvicorn.Config(self.application, ws="none", lifespan="off", log_config=None)
        self.state = ServerState()

    def connect(self, address: str = "192.0.2.1", port: int = 8000) -> tuple[BoundedHttp, MemoryTransport]:
        """A new connection from there, to this port."""
        transport = MemoryTransport(address, port)
        connection = BoundedHttp(self.front, self.config, self.state, {}, asyncio.get_running_loop())
        transport.protocol = connection
        connection.connection_made(cast(asyncio.Transport, transport))
        return connection, transport

    async def settle(self) -> None:
        """Lets everything run that can run now."""
        for _ in range(20):
            await asyncio.sleep(0)
