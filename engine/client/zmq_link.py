"""`Link`: a ZeroMQ DEALER socket on an asyncio loop.

ZeroMQ's file descriptor is edge-triggered, and a send may consume the signal: every send is followed by a
read, and every read continues until nothing is left. A link never waits. ZeroMQ reconnects silently and loses
messages in flight, so a socket monitor reports a broken connection, and an engine with other keys.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from engine.client.keys import GatewayKeys

MAX_MESSAGES_PER_TURN = 256
MAX_MESSAGE_BYTES = 1 << 30
SEND_QUEUE_MESSAGES = 10_000
RECEIVE_QUEUE_MESSAGES = 1_000
KEYS_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Link:
    """One DEALER connection, never reused. When it breaks, ZeroMQ drops what was queued either way: so the
    client counts tokens, and an engine that ends waits for its last outcomes' acknowledgement."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        identity: bytes,
        on_message: Callable[[bytes], None],
        on_broken: Callable[[], None] = lambda: None,
        *,
        keys: GatewayKeys | None = None,
        on_keys_refused: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts connecting. Called from the running loop: `on_message` with every message, `on_broken` when
        an established connection has ended, after its messages, `on_keys_refused` when keys do not match.
        Raises `ValueError` when `address` is not a ZeroMQ address."""
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_broken = on_broken
        self._on_keys_refused = on_keys_refused
        self._scheduled: asyncio.Handle | None = None
        self._socket = context.socket(zmq.DEALER)
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.IDENTITY, identity)
            # Without it, messages to an absent engine would queue up and reach a later one.
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
            self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
            self._socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            if keys is not None:
                keys.apply(self._socket)
            try:
                self._socket.connect(address)
            except zmq.ZMQError as error:
                raise ValueError(f"engine address {address!r} is not usable: {error.strerror}") from error
            self._descriptor = int(self._socket.getsockopt(zmq.FD))
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | KEYS_REFUSED)
            self._monitor_descriptor = int(self._monitor.getsockopt(zmq.FD))
        except BaseException:
            self._socket.close()
            raise
        self._loop.add_reader(self._descriptor, self.read)
        self._loop.add_reader(self._monitor_descriptor, self._read_monitor)
        self._read_soon()
        self._loop.call_soon(self._read_monitor)

    @property
    def is_open(self) -> bool:
        return not self._socket.closed

    def send(self, payload: bytes) -> bool:
        """Queues a message; False when there is no connection or its queue is full."""
        try:
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            self._read_soon()
        return True

    def read(self, max_messages: int = MAX_MESSAGES_PER_TURN) -> None:
        """Delivers received messages: a bounded number now, the rest at the loop's next turn."""
        for _ in range(max_messages):
            if not self.is_open:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 1:
                self._on_message(frames[0])
        self._read_soon()

    def close(self) -> None:
        """Closes immediately; unsent messages are dropped."""
        if self.is_open:
            self._loop.remove_reader(self._descriptor)
            self._loop.remove_reader(self._monitor_descriptor)
            if self._scheduled is not None:
                self._scheduled.cancel()
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()

    def _read_soon(self) -> None:
        if self.is_open and self._scheduled is None and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._scheduled = self._loop.call_soon(self._read_scheduled)

    def _read_scheduled(self) -> None:
        self._scheduled = None
        with contextlib.suppress(zmq.ContextTerminated):
            self.read()

    def _read_monitor(self) -> None:
        has_broken = has_refused = False
        while self.is_open:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            has_broken |= event["event"] == zmq.EVENT_DISCONNECTED
            has_refused |= bool(event["event"] & KEYS_REFUSED)
        if has_broken:
            self.read(RECEIVE_QUEUE_MESSAGES)
        if has_broken and self.is_open:
            self._on_broken()
        if has_refused and self.is_open:
            self._on_keys_refused()
