"""Has nothing come for too long?

One timer for a whole answer: what comes only moves the deadline, which is looked at when the timer fires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_S = 4.0
"""The timer looks at the deadline at least so often: one that comes nearer seldom needs another timer."""


class Patience:
    """A deadline that moves. Use from one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, on_late: Callable[[], None]) -> None:
        """`on_late` is called once, when the deadline has passed."""
        self._loop = loop
        self._on_late = on_late
        now_s = loop.time()
        self._deadline_s = now_s + seconds
        self._set(now_s)

    def wait(self, seconds: float) -> None:
        """From now on so long. Where that is earlier than the next look, the timer is set anew."""
        now_s = self._loop.time()
        self._deadline_s = now_s + seconds
        if self._deadline_s < self._look_s:
            self._timer.cancel()
            self._set(now_s)

    def end(self) -> None:
        """Nothing is waited for any more. Who is called is let go of: it holds this, and the two would keep
        one another, and all that they hold, until the collector of cycles comes by."""
        self._timer.cancel()
        self._on_late = _nothing

    def _set(self, now_s: float) -> None:
        self._look_s = min(self._deadline_s, now_s + LOOK_S)
        self._timer = self._loop.call_at(self._look_s, self._look)

    def _look(self) -> None:
        now_s = self._loop.time()
        if now_s < self._deadline_s:
            self._set(now_s)
        else:
            on_late = self._on_late
            self.end()
            on_late()


def _nothing() -> None:
    pass
