"""Compares the sums of usage with the ledger, one run at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UsageChecked:
    at_us: int
    """When it started."""
    problems: tuple[str, ...]


class UsageCheck:
    """The comparison reads the whole ledger: calls during a run share its result. Use from one event loop."""

    def __init__(self, compare: Callable[[], Awaitable[list[str]]], wall_clock: Callable[[], float]) -> None:
        self._compare = compare
        self._wall_clock = wall_clock
        self._running: asyncio.Task[UsageChecked] | None = None
        self.last: UsageChecked | None = None
        """In this process; None: there was none."""

    async def run(self) -> UsageChecked:
        """The result of a comparison that ends after this call. Raises what the comparison raises."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._look())
        # A client that goes away does not end it for the others.
        return await asyncio.shield(self._running)

    async def _look(self) -> UsageChecked:
        at_us = round(self._wall_clock() * 1e6)
        self.last = UsageChecked(at_us, tuple(await self._compare()))
        return self.last
