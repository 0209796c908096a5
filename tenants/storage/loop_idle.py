"""Detects from another thread that an event loop is idle.

A thread that batches the loop's requests waits while more may come. Measured by a callback in the loop: an
iteration that took almost no time did almost nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

IDLE_TURN_S = 50e-6
"""An iteration shorter than this counts as idle: handling a request takes several times as long."""


class LoopIdle:
    """Whether the loop that called `watch` last is idle."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._idle = threading.Event()
        self._idle.set()
        self._watched: asyncio.AbstractEventLoop | None = None
        self._checked_s = 0.0

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watches `loop` until it is idle. Call from within the loop."""
        if self._watched is not loop:
            self._watched = loop
            self._idle.clear()
            self._checked_s = self._clock()
            loop.call_soon(self._check, loop)

    def wait(self, most_s: float) -> None:
        """Returns when the loop is idle, or after `most_s`. Call from another thread."""
        self._idle.wait(most_s)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._watched is not loop:
            return  # another loop is watched by now
        now_s = self._clock()
        if now_s - self._checked_s < IDLE_TURN_S:
            self._watched = None
            self._idle.set()
        else:
            self._checked_s = now_s
            loop.call_soon(self._check, loop)
