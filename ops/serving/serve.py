"""Starts, runs and ends a Fairgate server.

Whatever can be wrong is checked before the first request, and is one line and exit code 1: the data
directory, another server on it, the port, the model, the database, Redis, the engine. SIGTERM and SIGINT
drain: no new connections, running requests end within the grace time; a second signal cuts them. SIGUSR2
switches estimates off and on, so that their cost can be measured on a running server.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import importlib.util
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import uvicorn
import uvloop

from engine.client.client import EngineUnavailable
from gateway.requests.prompt import TokenizerMissing
from migrations import runner
from ops.serving import datadir
from ops.serving.composition import Running, build
from ops.serving.hub_model import ModelMissing, with_local_model
from ops.serving.supervisor import EngineStartFailed
from ops.settings.settings import Settings
from tenants.admin.admin import Admin
from tenants.admin.audit import Actor
from tenants.admin.commands import KeyCreate, TenantCreate
from tenants.errors import DatabaseUnavailable, TenancyError
from tenants.quota.store import QuotaStoreUnavailable
from tenants.types import SCOPES, Tier

OWNER = "owner"
"""Tenant of the admin key that the first start makes."""
MODEL_LOAD_S = 900.0
KEEP_ALIVE_S = 30
PROBE_EVERY_S = 60
"""Of a connection on which nothing moves."""
COLLECT_AFTER_OBJECTS = 20_000
"""Python's own is 700."""
BACKLOG = 2048
ENGINE_PACKAGES = ("torch", "transformers", "safetensors")
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")

log = logging.getLogger("fairgate.serve")
T = TypeVar("T")


class StartFailed(Exception):
    """The server cannot start; the message says why and what to do."""


class Stopped(Exception):
    """A signal came before the server was up."""


@dataclass(frozen=True)
class Started:
    """Addresses and names of a server that is up."""

    url: str
    docs_url: str
    model: str
    data_dir: Path
    owner_key: str | None
    """The admin key, at the first start only."""


def serve(settings: Settings, announce: Callable[[Started], None]) -> int:
    """Serves until a signal stops it; returns the exit code. `announce` is called once it is up."""
    logging.basicConfig(
        level=settings.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    for noisy in ("httpx", "alembic", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    os.umask(0o077)
    _raise_open_files()
    try:
        if settings.engine.serve:
            check_engine()
            settings = with_local_model(settings)
            check_model(settings.model)
        datadir.ensure(settings.data_dir)
        with datadir.serve_lock(settings.data_dir), _listening(settings.host, settings.port) as listener:
            pepper = datadir.pepper(settings, create=True)
            runner.upgrade(settings.resolved_database_url)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
                loop.run(_run(settings, pepper, listener, announce))
    except Stopped:
        return 0
    except (StartFailed, ModelMissing, datadir.DataDirRefused, TenancyError, TokenizerMissing) as error:
        return _refuse(error, settings)
    except (QuotaStoreUnavailable, EngineStartFailed, EngineUnavailable, OSError) as error:
        return _refuse(error, settings)
    return 0


def missing_packages() -> list[str]:
    """Packages of the engine that are not installed."""
    return [name for name in ENGINE_PACKAGES if importlib.util.find_spec(name) is None]


def check_engine() -> None:
    """Raises `StartFailed` when the engine cannot run for lack of packages."""
    if missing := missing_packages():
        raise StartFailed(f"the engine needs {', '.join(missing)}: pip install 'fairgate[engine]'")


def check_model(model: Path) -> None:
    """Raises `StartFailed` for a directory that holds no model, before anything else is begun."""
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
        return (
            f"database {_without_password(settings.resolved_database_url)}: {error};"
            " start it or correct --database-url"
        )
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
    credentials, at, place = rest.rpartition("@")
    user = credentials.partition(":")[0]
    return f"{scheme}{separator}{user + at if user else ''}{place}"


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """The bound socket: taken before the model is loaded, so that a port in use costs no time."""
    where = f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartFailed(f"host {host} is not an address of this machine: {error.strerror}") from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit these: a batch request may wait in silence for a day, which routers on the way
        # would take for its end, and a client that is gone without a word is noticed.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
            if hasattr(socket, name):  # else the system's own times count
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), PROBE_EVERY_S)
        try:
            listener.bind(address)
            # Only listening shows whether another process listens there.
            listener.listen(BACKLOG)
        except OSError as error:
            match error.errno:
                case errno.EADDRINUSE:
                    advice = (
                        "is in use; stop what uses it, or choose another with --port (0 takes a free one)"
                    )
                case errno.EACCES:
                    advice = "is not allowed for this user; choose a port above 1023 with --port"
                case errno.EADDRNOTAVAIL:
                    advice = "is not an address of this machine; correct --host"
                case _:
                    advice = f"cannot be used: {error.strerror}"
            raise StartFailed(f"{where} {advice}") from None
        yield listener


def _raise_open_files() -> None:
    """Raises the limit of open files as far as allowed: every waiting request is an open connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else max(soft, 65_536)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: it would raise the signal again before the cleanup."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _run(
    settings: Settings, pepper: bytes, listener: socket.socket, announce: Callable[[Started], None]
) -> None:
    stopping = asyncio.Event()
    signals = _Signals(stopping)
    async with build(settings, pepper) as running:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, _switch_estimates, running)
        if settings.engine.serve:
            log.info("engine is loading %s", settings.model)
        await _unless(stopping, running.supervisor.ready(MODEL_LOAD_S))
        config = uvicorn.Config(
            running.app,
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(settings.gateway.shutdown_grace_s)),
        )
        server = signals.server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            up = asyncio.create_task(server.up.wait())
            await asyncio.wait({up, serving}, return_when=asyncio.FIRST_COMPLETED)
            up.cancel()
            if not server.started:
                await serving
                raise StartFailed("the gateway did not start; the log above says why")
            # Not before everything works: the key is shown once, and would be lost in a failure.
            owner_key = await _owner_key(running.admin)
            await running.directory.refresh()
            started = _started(running, listener, owner_key)
            server_file = datadir.ServerFile(started.url, os.getpid(), running.control_token)
            datadir.write_server_file(settings.data_dir, server_file)
            _tune_garbage_collector()
            announce(started)
            stop = asyncio.create_task(stopping.wait())
            await asyncio.wait({stop, serving}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
        finally:
            datadir.remove_server_file(settings.data_dir)
            server.should_exit = True
            await serving
            log.info("requests are done, the engine ends")


def _switch_estimates(running: Running) -> None:
    is_enabled = running.gateway.switch_estimates()
    log.warning(
        "SIGUSR2: requests are %s what they will wait, take and cost", "told" if is_enabled else "not told"
    )


def _tune_garbage_collector() -> None:
    """Objects that exist once the server is up stay: they are excluded from collections, which stop all
    requests. What a request leaves is freed by reference counts, so collections can be rarer."""
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
    """The result of `work`; `Stopped` when a signal comes first."""
    task = asyncio.ensure_future(work)
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Stopped
        return task.result()
    finally:
        for each in (task, stop):
            each.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)


async def _owner_key(admin: Admin) -> str | None:
    """Makes the owner's tenant and admin key at the first start; None at every later one."""
    if any(tenant.name == OWNER for tenant in await admin.list_tenants()):
        return None
    actor = Actor("system", "first start")
    await admin.create_tenant(actor, TenantCreate(name=OWNER, tier=Tier.STANDARD, tiers=list(Tier)))
    _, secret = await admin.create_key(actor, KeyCreate(tenant=OWNER, scopes=list(SCOPES)), name="owner")
    return secret


def _started(running: Running, listener: socket.socket, owner_key: str | None) -> Started:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    settings = running.settings
    return Started(url, f"{url}/docs", settings.served_model_name, settings.data_dir, owner_key)
