"""Starts, runs and ends a Fairgate server.

Everything is checked before the first request; a failure is one line and exit code 1. Signals are in
`docs/operating.md`; a second SIGTERM or SIGINT cuts running requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import uvicorn
import uvloop

from engine.client.client import EngineUnavailable
from gateway.http.admin_listener import AdminListener
from gateway.http.bounded_http import BoundedHttp, HttpFront
from gateway.http.connection_table import ConnectionTable
from gateway.requests.prompt import TokenizerMissing
from migrations import runner
from ops.serving import datadir
from ops.serving.composition import Running, build
from ops.serving.hub_model import ModelMissing, with_local_model
from ops.serving.listeners import StartFailed, admin_listening, listening, url_of
from ops.serving.logs import open_log, switch_debug
from ops.serving.open_files import OpenFiles, divided, raise_limit
from ops.serving.supervisor import EngineStartFailed
from ops.settings.settings import BadSetting, Settings
from tenants.admin.admin import Admin
from tenants.admin.audit import Actor
from tenants.errors import DatabaseUnavailable, NotWritten, TenancyError
from tenants.nouns.key import KeyCreate
from tenants.nouns.tenant import TenantCreate
from tenants.people.person import link_path
from tenants.quota.store import QuotaStoreUnavailable
from tenants.types import SCOPES, Tier

FIRST_START = Actor("system", "first start")
OWNER = "owner"
"""Tenant of the admin key that the first start makes."""
MODEL_LOAD_S = 900.0
COLLECT_AFTER_OBJECTS = 20_000
"""Python's own is 700."""
SWEEP_EVERY_TICKS = 5
"""Of connections that rest too long; uvicorn ticks ten times a second."""
ENGINE_PACKAGES = ("torch", "transformers", "safetensors")
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")

log = logging.getLogger("fairgate.serve")
T = TypeVar("T")


class Stopped(Exception):
    """A signal came before the server was up."""


@dataclass(frozen=True)
class Started:
    url: str
    docs_url: str
    model: str
    data_dir: Path
    owner_key: str | None
    """The admin key, at the first start only."""
    admin_url: str | None = None
    """Of the admin listener; None: there is none."""
    console_url: str = ""
    set_up_link: str | None = None
    """Makes the first owner of the console, as long as there is none."""


def serve(settings: Settings, announce: Callable[[Started], None]) -> int:
    """Serves until a signal stops it; returns the exit code. `announce` is called once it is up."""
    open_log(settings.log_level, settings.log_format)
    open_files = raise_limit()
    try:
        limits = divided(settings, open_files)
        if settings.engine.serve:
            check_engine()
            settings = with_local_model(settings)
            check_model(settings.model)
        datadir.ensure(settings.data_dir)
        with (
            datadir.serve_lock(settings.data_dir),
            listening(settings.host, settings.port, limits.backlog) as listener,
            admin_listening(settings) as admin_listener,
        ):
            most = limits.connections.max_connections
            log.info("%d of %d open files are for clients' connections", most, open_files)
            pepper = datadir.pepper(settings)
            runner.upgrade(settings.resolved_database_url)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
                loop.run(_run(settings, pepper, listener, admin_listener, limits, announce))
    except Stopped:
        return 0
    except (
        StartFailed,
        BadSetting,
        ModelMissing,
        datadir.DataDirRefused,
        TenancyError,
        TokenizerMissing,
    ) as error:
        return _refuse(error, settings)
    except (QuotaStoreUnavailable, EngineStartFailed, EngineUnavailable, OSError) as error:
        return _refuse(error, settings)
    return 0


def missing_packages() -> list[str]:
    return [name for name in ENGINE_PACKAGES if importlib.util.find_spec(name) is None]


def check_engine() -> None:
    """Raises `StartFailed` where packages of the engine are missing."""
    if missing := missing_packages():
        raise StartFailed(f"the engine needs {', '.join(missing)}: pip install 'fairgate[engine]'")


def check_model(model: Path) -> None:
    """Raises `StartFailed` for a directory without a model, before anything else is begun."""
    if not model.is_dir():
        raise StartFailed(
            f"model {model} is not a directory; --model takes one in Hugging Face format, or the id of a"
            " model on the hub (organisation/name)"
        )
    if not (model / "config.json").is_file():
        raise StartFailed(f"model directory {model} has no config.json; it must be in Hugging Face format")
    if not any(True for pattern in WEIGHT_FILES for _ in model.glob(pattern)):
        raise StartFailed(
            f"model directory {model} has no weights (*.safetensors); download or save them there first"
        )


def explain(error: Exception, settings: Settings) -> str:
    """One line: what is wrong and what to do, without the driver's own message."""
    if isinstance(error, QuotaStoreUnavailable):
        return (
            f"Redis at {_without_password(settings.redis_url)}: {error}; start it, correct --redis-url,"
            " or leave it out to keep the counters in the process"
        )
    if isinstance(error, DatabaseUnavailable):
        way_out = "start it or correct --database-url"
        if isinstance(error, NotWritten):
            way_out = "its disk needs room, and must be writable"
        return f"database {_without_password(settings.resolved_database_url)}: {error}; {way_out}"
    if isinstance(error, EngineStartFailed):
        return f"the engine did not start: {error}"
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    return str(error)


def _refuse(error: Exception, settings: Settings) -> int:
    log.debug("start refused", exc_info=error)
    print(f"fairgate serve: {explain(error, settings)}", file=sys.stderr, flush=True)
    return 1


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    # What follows a `?` may have the Sentinels' password.
    credentials, at, place = rest.partition("?")[0].rpartition("@")
    user = credentials.partition(":")[0]
    return f"{scheme}{separator}{user + at if user else ''}{place}"


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


async def _run(
    settings: Settings,
    pepper: bytes,
    listener: socket.socket,
    admin_listener: socket.socket | None,
    limits: OpenFiles,
    announce: Callable[[Started], None],
) -> None:
    stopping = asyncio.Event()
    signals = _Signals(stopping)
    async with build(settings, pepper) as running:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, _switch_debug, settings)
        loop.add_signal_handler(signal.SIGUSR2, _switch_estimates, running)
        if settings.engine.serve and running.gateway.deps.members is None:
            log.info("loading the model %s: half a minute or more", settings.model)
        await _unless(stopping, running.supervisor.ready(MODEL_LOAD_S))
        front = HttpFront(
            ConnectionTable(limits.connections),
            settings.gateway.trusted_proxies,
            running.gateway.metrics,
            running.gateway.refusals.note,
            None if admin_listener is None else AdminListener(*admin_listener.getsockname()[:2]),
            None if admin_listener is None else ConnectionTable(limits.admin_connections),
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
        server = signals.server = _Server(config, front, lambda: running.app.state.start_failure)
        sockets = [listener] if admin_listener is None else [listener, admin_listener]
        serving = asyncio.create_task(server.serve(sockets=sockets))
        try:
            up = asyncio.create_task(server.up.wait())
            await asyncio.wait({up, serving}, return_when=asyncio.FIRST_COMPLETED)
            up.cancel()
            if not server.started:
                await serving
            # Only once everything works: a refused start leaves no new pepper, and the key is shown once.
            datadir.keep_pepper(settings, pepper)
            owner_key = await _owner_key(running.admin)
            set_up = await running.admin.people.make_set_up_link(FIRST_START)
            await running.directory.refresh()
            started = _started(running, listener, admin_listener, owner_key, set_up)
            server_file = datadir.ServerFile(
                started.url, os.getpid(), running.control_token, started.admin_url or ""
            )
            datadir.write_server_file(settings.data_dir, server_file)
            _tune_garbage_collector()
            announce(started)
            waiting = {
                asyncio.create_task(event.wait()) for event in (stopping, running.gateway.presence.is_taken)
            }
            await asyncio.wait({*waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            if running.gateway.presence.taken is not None:
                server.force_exit = True  # running requests are cut: the other process settles them
        finally:
            datadir.remove_server_file(settings.data_dir)
            # Streams of the console last for hours: the drain would wait for them.
            running.app.state.live.end_streams()
            server.should_exit = True
            await serving
            log.info("requests are done, the engine ends")
        if running.gateway.presence.taken is not None:
            raise running.gateway.presence.taken


def _switch_estimates(running: Running) -> None:
    is_enabled = running.gateway.pools.switch_estimates()
    log.warning(
        "SIGUSR2: requests are %s what they will wait, take and cost", "told" if is_enabled else "not told"
    )


def _switch_debug(settings: Settings) -> None:
    is_debug = switch_debug(settings.log_level)
    log.warning("SIGUSR1: the log's level is %s", "debug" if is_debug else settings.log_level)


def _tune_garbage_collector() -> None:
    """Excludes what exists at the start from collections, which stop all requests, and makes them rarer:
    what a request leaves is freed by reference counts."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER_OBJECTS, 20, 20)


class _Signals:
    """First signal: drain. Second: cut."""

    def __init__(self, stopping: asyncio.Event) -> None:
        self.server: uvicorn.Server | None = None
        self._stopping = stopping
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._arrived, number)

    def _arrived(self, number: signal.Signals) -> None:
        if self._stopping.is_set() and self.server is not None:
            log.warning("second signal: running requests are cut")
            self.server.force_exit = True
        log.info("%s: draining", number.name)
        self._stopping.set()


async def _unless(stopping: asyncio.Event, work: Awaitable[T]) -> T:
    """The result of `work`. Raises `Stopped` when a signal comes first."""
    task = asyncio.ensure_future(work)
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Stopped
        return task.result()
    finally:
        for other in (task, stop):
            other.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)


async def _owner_key(admin: Admin) -> str | None:
    """Makes the owner's tenant and admin key at the first start; None at later ones."""
    if any(tenant.name == OWNER for tenant in await admin.tenants.all()):
        return None
    await admin.tenants.create(FIRST_START, TenantCreate(name=OWNER, tier=Tier.STANDARD, tiers=list(Tier)))
    wanted = KeyCreate(tenant=OWNER, scopes=list(SCOPES), name="owner")
    _, secret = await admin.keys.create(FIRST_START, wanted)
    return secret


def _started(
    running: Running,
    listener: socket.socket,
    admin_listener: socket.socket | None,
    owner_key: str | None,
    set_up_token: str | None,
) -> Started:
    url, settings = url_of(listener), running.settings
    admin_url = None if admin_listener is None else url_of(admin_listener)
    # The console answers where the admin API does.
    console_url = settings.gateway.console_url or admin_url or url
    link = None if set_up_token is None else console_url + link_path(set_up_token)
    name, data_dir = settings.served_model_name, settings.data_dir
    console = f"{console_url}/console"
    return Started(url, f"{url}/docs", name, data_dir, owner_key, admin_url, console, link)
