"""How long may a client take to read what is written to it?

One timer for a whole answer (`patience.py`): each write only moves its deadline, so that a stream does not
pay for a timeout with every chunk.
"""

from __future__ import annotations

import asyncio
from typing import Any

from litestar.types import Send

from gateway.patience import Patience
from gateway.wire import send_json


class BoundedSend:
    """`send` that a client who reads nothing cannot hold for ever: raises `TimeoutError`. For one task; `end`
    it."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._patience: Patience | None = None
        self._task: asyncio.Task[Any] | None = None
        """The one that writes."""
        self._is_writing = False
        """It waits for the client."""
        self._is_late = False

    async def __call__(self, message: object) -> None:
        task = self._task = self._task or asyncio.current_task()
        assert task is not None
        cancelled_before = task.cancelling()
        if self._patience is None:
            self._patience = Patience(self._loop, self._timeout_s, self._late)
        else:
            self._patience.wait(self._timeout_s)
        self._is_writing = True
        try:
            await self._send(message)  # type: ignore[arg-type]
        except asyncio.CancelledError:
            # Somebody else may want it ended as well: that goes first.
            if self._is_late and task.uncancel() <= cancelled_before:
                raise TimeoutError from None
            raise
        finally:
            self._is_writing = False

    async def json(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        """A whole JSON answer."""
        await send_json(self, status, body, headers)

    def end(self) -> None:
        """Nothing is written any more."""
        if self._patience is not None:
            self._patience.end()

    def _late(self) -> None:
        self._patience = None
        if self._is_writing and self._task is not None:
            self._is_late = True
            self._task.cancel()
