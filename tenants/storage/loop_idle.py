"""Has an event loop nothing more to do for the moment?

Seen from another thread, which gathers what the loop asks for: as long as the loop is busy more may come,
and once it waits for its sockets nothing will, so whoever gathers had better begin. A loop does not say that
it rests, so it is looked at from within: a turn that took next to no time did next to nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

IDLE_TURN_S = 50e-6
"""A turn of the loop that took less did nothing worth waiting for: a request takes several times as long."""


class LoopIdle:
    """Whether the loop that asked last is at rest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_here = threading.Event()
        self._is_here.set()
        self._watched: asyncio.AbstractEventLoop | None = None
        self._looked_s = 0.0

    def asked(self, loop: asyncio.AbstractEventLoop) -> None:
        """From within the loop, which asks for something: it is watched until it rests."""
        if self._watched is not loop:
            self._watched = loop
            self._is_here.clear()
            self._looked_s = self._clock()
            loop.call_soon(self._look, loop)

    def wait(self, most_s: float) -> None:
        """From another thread: returns when the loop rests, or after so long."""
        self._is_here.wait(most_s)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._watched is not loop:
            return  # another one has asked since
        now_s = self._clock()
        if now_s - self._looked_s < IDLE_TURN_S:
            self._watched = None
            self._is_here.set()
        else:
            self._looked_s = now_s
            loop.call_soon(self._look, loop)
