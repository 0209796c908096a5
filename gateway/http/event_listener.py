"""Events of a run for the writer of its answer, with keep-alives: `Silence` if none came."""

from __future__ import annotations

import asyncio
from functools import partial

from gateway.asyncio_helpers import IdleTimeout
from gateway.requests.run import Event, Run, Silence
from tenants.outcomes import RequestOutcome


class EventListener:
    """A server that stops interrupts the run, once; the client still gets the last event."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._was_cut = False
        self._idle_timeout: IdleTimeout | None = None

    def note_silence(self, seconds: float) -> None:
        """Until `end`, `Silence` comes after `seconds` without an event. A repeated call restarts it."""
        if self._idle_timeout is None:
            self._listen_on(seconds)
        else:
            self._idle_timeout.wait(seconds)

    def end(self) -> None:
        if self._idle_timeout is not None:
            self._idle_timeout.end()
            self._idle_timeout = None

    def _listen_on(self, seconds: float) -> None:
        self._idle_timeout = IdleTimeout(asyncio.get_running_loop(), seconds, partial(self._silent, seconds))

    def _silent(self, seconds: float) -> None:
        if not len(self._run.events):  # otherwise the client takes its time
            self._run.events.put(Silence())
        self._listen_on(seconds)

    async def next(self, timeout_s: float | None = None) -> Event:
        """Raises `TimeoutError` after a silence of `timeout_s`."""
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
        """None after a silence of `timeout_s`."""
        try:
            return await self.next(timeout_s)
        except TimeoutError:
            return None

    def available(self) -> list[Event]:
        """A step's events are written together."""
        return self._run.events.take()
