"""What does whoever writes an answer hear of its run?

Its events, one after the other or all that are there; and that there are none, for a stream whose client or
proxy must not take it for dead.
"""

from __future__ import annotations

import asyncio
from functools import partial

from gateway.asyncio_helpers import IdleTimeout
from gateway.domain.outcomes import RequestOutcome
from gateway.requests.run import Event, Run, Silence


class EventListener:
    """The events of a run. A server that stops cancels its handlers: that interrupts the run, once, and the
    client still gets the last word."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._was_cut = False
        self._patience: IdleTimeout | None = None

    def note_silence(self, seconds: float) -> None:
        """`Silence` is an event, too, whenever there is none for so long, from now until `end`. Said again it
        begins anew."""
        if self._patience is None:
            self._listen_on(seconds)
        else:
            self._patience.wait(seconds)

    def end(self) -> None:
        """Silence is none any more."""
        if self._patience is not None:
            self._patience.end()
            self._patience = None

    def _listen_on(self, seconds: float) -> None:
        self._patience = IdleTimeout(asyncio.get_running_loop(), seconds, partial(self._silent, seconds))

    def _silent(self, seconds: float) -> None:
        if not len(self._run.events):  # otherwise it is the client who takes its time
            self._run.events.put(Silence())
        self._listen_on(seconds)

    async def next(self, timeout_s: float | None = None) -> Event:
        """The next event. Raises `TimeoutError` after a silence of `timeout_s`."""
        while True:
            try:
                if timeout_s is None:
                    return await self._run.events.get()
                async with asyncio.timeout(timeout_s):
                    return await self._run.events.get()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._was_cut or task is None:
                    raise
                self._was_cut = True
                task.uncancel()
                self._run.interrupt(RequestOutcome.SHUTDOWN)

    async def within(self, timeout_s: float) -> Event | None:
        """The next event; None after a silence of `timeout_s`."""
        try:
            return await self.next(timeout_s)
        except TimeoutError:
            return None

    def at_once(self) -> list[Event]:
        """What is there already: a step's events go out together."""
        return self._run.events.take()
