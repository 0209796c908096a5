"""Services of a gateway: their order, what all of them have, periodic tasks, and background writers."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry

from gateway.config import GatewayConfig
from tenants.errors import DatabaseUnavailable
from tenants.storage.database import Database
from tenants.storage.task_stop import stop

FLUSH_EVERY_S = 1.0

Step = Callable[[], Awaitable[object] | None]
Task = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, kw_only=True)
class Site:
    """What every part of one gateway process has."""

    gateway_id: str
    """Stable over restarts: open reserves are found by it."""
    database: Database
    config: GatewayConfig = field(default_factory=GatewayConfig)
    prometheus: CollectorRegistry = field(default_factory=CollectorRegistry)
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    address: str = ""
    """Where it is reached, as others show it."""

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.wall_clock(), UTC)


@dataclass(frozen=True, slots=True)
class GatewayService:
    """What is started and stopped, or runs in between."""

    name: str
    start: Step | None = None
    stop: Step | None = None
    task: Task | None = None
    """Created after the start, cancelled before the stop."""
    why: str = ""
    """Why it has its place in the order."""


class Services:
    """Started in order and stopped in reverse; where one does not start, those before it are stopped."""

    def __init__(self, *services: GatewayService) -> None:
        self._services: Sequence[GatewayService] = services
        self._started = AsyncExitStack()

    async def start(self) -> None:
        async with AsyncExitStack() as started:
            for service in self._services:
                await _step(service.start)
                started.push_async_callback(_step, service.stop)
                if service.task is not None:
                    task = asyncio.create_task(service.task(), name=f"gateway {service.name}")
                    started.push_async_callback(stop, [task])
            self._started = started.pop_all()

    async def stop(self) -> None:
        """Each is stopped even if another one fails to."""
        await self._started.aclose()


async def _step(step: Step | None) -> None:
    if step is not None and (pending := step()) is not None:
        await pending


async def every(
    seconds: float,
    work: Callable[[], Awaitable[object] | None],
    log: logging.Logger,
    failed: str,
    *,
    starts_now: bool = False,
) -> None:
    """Calls `work` every `seconds` until cancelled. Errors are logged as `failed`; all but
    `DatabaseUnavailable` with their traceback."""
    if not starts_now:
        await asyncio.sleep(seconds)
    while True:
        try:
            if (pending := work()) is not None:
                await pending
        except DatabaseUnavailable as error:
            log.warning("%s: %s", failed, type(error).__name__)
        except Exception:
            log.exception(failed)
        await asyncio.sleep(seconds)


async def watch_lag(seconds: float, note: Callable[[float], None]) -> None:
    """Measures event loop lag: `note` gets how many seconds late each wake-up was. Runs until cancelled."""
    clock = asyncio.get_running_loop().time
    while True:
        due_s = clock() + seconds
        await asyncio.sleep(seconds)
        note(max(0.0, clock() - due_s))


class BackgroundWriter(ABC):
    """Writes notes to the database every `flush_every_s` and when it closes. A subclass bounds what it keeps,
    counts what it drops, and keeps what could not be written. Use from one event loop."""

    task_name: str
    log = logging.getLogger("fairgate.gateway.records")
    failed: str
    unavailable: str
    """Logged when a round fails, or raises `DatabaseUnavailable`."""
    flush_every_s = FLUSH_EVERY_S
    purge_every_s = math.inf

    _task: asyncio.Task[None] | None = None
    _purge_s = -math.inf

    def __init__(self, site: Site) -> None:
        self._database = site.database
        self._wall_clock = site.wall_clock

    @abstractmethod
    async def flush(self) -> None:
        """Writes what was noted; keeps it if the database is down."""

    async def purge(self) -> None:  # noqa: B027
        """Deletes expired rows. Raises `DatabaseUnavailable`."""

    @property
    def service(self) -> GatewayService:
        return GatewayService(self.task_name, self.start, self.close)

    def start(self) -> None:
        work = every(self.flush_every_s, self._round, self.log, self.failed)
        self._task = asyncio.create_task(work, name=self.task_name)

    async def close(self) -> None:
        """Writes what is left, if the database is up."""
        if self._task is not None:
            await stop([self._task])
        with self._while_away():
            await self.flush()

    def _now_us(self) -> int:
        return round(self._wall_clock() * 1e6)

    async def _round(self) -> None:
        with self._while_away():
            await self._work()

    @contextmanager
    def _while_away(self) -> Iterator[None]:
        try:
            yield
        except DatabaseUnavailable as error:
            self.log.warning("%s: %s", self.unavailable, type(error).__name__)

    async def _work(self) -> None:
        await self.flush()
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._purge_s:
            await self.purge()
            self._purge_s = now_s + self.purge_every_s
