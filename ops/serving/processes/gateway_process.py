"""One gateway process: its HTTP server, its signals, and how it drains."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TypeVar

import uvicorn

from gateway.http.admin_listener import AdminListener
from gateway.http.bounded_http import BoundedHttp, HttpFront
from gateway.http.connection_table import ConnectionTable
from gateway.workers.workers import counts_of
from ops.serving.composition import Running
from ops.serving.listeners import Door
from ops.serving.logs import switch_debug
from ops.serving.open_files import OpenFiles
from ops.settings.settings import Settings
from tenants.directory.gateways import IdentityTaken

MODEL_LOAD_S = 900.0
COLLECT_AFTER_OBJECTS = 20_000
"""Python's own is 700."""
SWEEP_EVERY_TICKS = 5
"""Of connections that rest too long; uvicorn ticks ten times a second."""

log = logging.getLogger("fairgate.serve")
T = TypeVar("T")


class Stopped(Exception):
    """A signal came before the server was up."""


class Stop:
    """Asked for once: requests may finish. Asked for again: `cut`."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.cut: Callable[[], None] = lambda: None

    def at_signals(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            asyncio.get_running_loop().add_signal_handler(number, self._arrived, number)

    async def first(self, work: Awaitable[T]) -> T:
        """The result of `work`. Raises `Stopped` when it is asked for first."""
        task = asyncio.ensure_future(work)
        stop = asyncio.create_task(self.asked.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Stopped
            return task.result()
        finally:
            for other in (task, stop):
                other.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    def _arrived(self, number: signal.Signals) -> None:
        if self.asked.is_set():
            log.warning("second signal: running requests are cut")
            self.cut()
        log.info("%s: draining", number.name)
        self.asked.set()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: it would raise the signal again before the cleanup."""

    def __init__(
        self, config: uvicorn.Config, front: HttpFront, start_failure: Callable[[], Exception]
    ) -> None:
        super().__init__(config)
        self._start_failure = start_failure
        self.up = asyncio.Event()
        self._front = front

    async def on_tick(self, counter: int) -> bool:
        if counter % SWEEP_EVERY_TICKS == 0:
            self._front.sweep(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    def cut(self) -> None:
        """Ends running requests."""
        self.force_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Raises the application's own error, which uvicorn would log and exit for."""
        uvicorn_log = logging.getLogger("uvicorn.error")
        uvicorn_log.disabled = True
        try:
            await super().startup(sockets)
        except SystemExit:
            raise self._start_failure() from None
        finally:
            uvicorn_log.disabled = False
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run_gateway(
    running: Running,
    door: Door,
    limits: OpenFiles,
    stop: Stop,
    when_up: Callable[[], AbstractAsyncContextManager[None]],
    more_sockets: Sequence[socket.socket] = (),
) -> None:
    """Serves until it shall stop, and drains. `when_up` is left before it drains."""
    settings, presence = running.settings, running.gateway.presence
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, switch_level, settings)
    loop.add_signal_handler(signal.SIGUSR2, _switch_estimates, running)
    if settings.engine.serve and running.gateway.deps.members is None:
        log.info("loading the model %s: half a minute or more", settings.model)
    await stop.first(running.supervisor.ready(MODEL_LOAD_S))
    admin_listener = door.admin_listener
    workers = running.gateway.deps.workers
    front = HttpFront(
        ConnectionTable(limits.connections, counts_of(workers, "connections")),
        settings.gateway.trusted_proxies,
        running.gateway.metrics,
        running.gateway.refusals.note,
        None if admin_listener is None else AdminListener(*admin_listener.getsockname()[:2]),
        None
        if admin_listener is None
        else ConnectionTable(limits.admin_connections, counts_of(workers, "admin connections")),
        None if workers is None else ConnectionTable(limits.admin_connections),
    )
    config = uvicorn.Config(
        running.app,
        http=partial(BoundedHttp, front),  # type: ignore[arg-type]  # a protocol factory
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=limits.backlog,
        timeout_graceful_shutdown=max(1, round(settings.gateway.shutdown_grace_s)),
    )
    server = _Server(config, front, lambda: running.app.state.start_failure)
    stop.cut = server.cut
    serving = asyncio.create_task(server.serve(sockets=[*door.sockets, *more_sockets]))
    try:
        up = asyncio.create_task(server.up.wait())
        await asyncio.wait({up, serving}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if not server.started:
            await serving
        async with when_up():
            _tune_garbage_collector()
            waiting = {asyncio.create_task(event.wait()) for event in (stop.asked, presence.is_taken)}
            await asyncio.wait({*waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            if isinstance(presence.taken, IdentityTaken):
                server.cut()  # the other process settles running requests
    finally:
        # Streams of the console last for hours: the drain would wait for them.
        running.app.state.live.end_streams()
        server.should_exit = True
        await serving
        log.info("requests are done")
    if presence.taken is not None:
        raise presence.taken


def _switch_estimates(running: Running) -> None:
    is_enabled = running.gateway.pools.switch_estimates()
    log.warning(
        "SIGUSR2: requests are %s what they will wait, take and cost", "told" if is_enabled else "not told"
    )


def switch_level(settings: Settings) -> None:
    is_debug = switch_debug(settings.log_level)
    log.warning("SIGUSR1: the log's level is %s", "debug" if is_debug else settings.log_level)


def _tune_garbage_collector() -> None:
    """Excludes what exists at the start from collections, which stop all requests, and makes them rarer:
    what a request leaves is freed by reference counts."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER_OBJECTS, 20, 20)
