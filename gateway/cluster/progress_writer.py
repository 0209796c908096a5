"""Writes what this gateway's running requests have used, at least once a second.

The last report if gateway and engine die together (`crash_charge.py`). One row, overwritten.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from gateway.background import every
from gateway.budget.holds import Holds
from gateway.deps import GatewayDeps
from gateway.upstream.base import engine_life
from tenants.errors import DatabaseUnavailable
from tenants.ledger.progress import Progress
from tenants.storage.task_stop import stop

WRITE_EVERY_S = 0.75
"""With the time of the write itself it stays below a second."""

log = logging.getLogger("fairgate.gateway.progress")


class ProgressWriter:
    """Use from one event loop. Start it after recovery has read the earlier life's record."""

    def __init__(self, deps: GatewayDeps, holds: Holds) -> None:
        self.earlier: Progress | None = None
        """The record of an earlier life, kept in what is written while its requests are open."""
        self._deps = deps
        self._holds = holds
        self._written = b""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        work = every(
            WRITE_EVERY_S, self.write, log, "the progress of requests was not written", starts_now=True
        )
        self._task = asyncio.create_task(work, name="gateway progress")

    async def close(self) -> None:
        """Stops writing; the row is removed with the gateway's own (`GatewayRegistry.forget`)."""
        if self._task is not None:
            await stop([self._task])

    async def write(self) -> None:
        packed = msgspec.msgpack.encode(self.now().after(self.earlier), order="deterministic")
        if packed == self._written:
            return
        try:
            at_us = round(self._deps.wall_clock() * 1e6)
            await self._deps.progress.write(self._deps.gateway_id, packed, at_us)
            self._written = packed
        except DatabaseUnavailable as error:
            log.warning("the progress of requests is written later: %s", type(error).__name__)

    def now(self) -> Progress:
        own = [pool for pool in self._deps.pools if pool.is_token_fair]
        lives = {pool.name: [engine_life(upstream.ready) for upstream in pool.upstreams] for pool in own}
        return Progress(
            frozenset(life for engine_lives in lives.values() for life in engine_lives if life),
            # While an engine has not announced itself, what will be sent to it is not known.
            frozenset(name for name, engine_lives in lives.items() if all(engine_lives)),
            self._holds.running(),
        )
