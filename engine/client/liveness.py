"""`LivenessThread`: heartbeats of a gateway's process, from a thread and a connection of its own.

A busy event loop sends none. The thread stops when the loop has not run for `PATIENCE_S`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import zmq

from engine import messages
from engine.client.keys import GatewayKeys
from engine.messages import HEARTBEAT_S, PATIENCE_S

STOP_S = 5.0


class LivenessThread:
    """One for each client. `turned` and `session` belong to the loop, all else to the thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        keys: GatewayKeys | None,
        *,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts it; it is silent until there is a session."""
        self.session = ""
        """`Ready.session` of the session to keep alive; empty: none."""
        self._context = context
        self._address = address
        self._keys = keys
        self._patience_s = patience_s
        self._clock = clock
        self._turned_s = clock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"liveness {address}", daemon=True)
        self._thread.start()

    def turned(self) -> None:
        """Notes that the event loop runs. To be called from the loop, at least every few heartbeats."""
        self._turned_s = self._clock()

    def close(self) -> None:
        """Ends the thread; afterwards its socket is closed."""
        self._ending.set()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        # An address that cannot be used was refused to the client before; its context may end first.
        with contextlib.suppress(zmq.ZMQError), self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IMMEDIATE, 1)
            # A heartbeat that cannot be sent now is of no use later.
            socket.setsockopt(zmq.SNDHWM, 4)
            if self._keys is not None:
                self._keys.apply(socket)
            socket.connect(self._address)
            while not self._ending.wait(HEARTBEAT_S):
                if self.session and self._clock() - self._turned_s < self._patience_s:
                    with contextlib.suppress(zmq.Again):
                        socket.send(messages.encode(messages.Alive(self.session)), zmq.NOBLOCK)
