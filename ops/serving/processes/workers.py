"""Supervises the gateway processes of one server: starts, replaces and ends them, and runs their engines.

What a server has once is here: data directory, secrets, schema, engines, and the listening sockets, on which
connections wait while a worker is replaced. A worker has a seat (its number, its own data directory), and
serves at a door. There is one seat more than doors: a new worker is up before it takes another's place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gateway.cluster.kept_limits import kept_limits
from gateway.upstream.capabilities import PLAIN_TEXT
from gateway.workers.keeper import serve_keeper
from gateway.workers.seat import Seat
from gateway.workers.tally import Tally
from ops.serving import audit_key, datadir
from ops.serving.composition import engine_options, gateway_config, seed_prices
from ops.serving.listeners import Door, StartFailed
from ops.serving.members import run_elsewhere
from ops.serving.open_files import OpenFiles
from ops.serving.post import UP, Post
from ops.serving.processes.first_start import Announce, announced
from ops.serving.processes.gateway_process import MODEL_LOAD_S, Stop, switch_level
from ops.serving.supervised import open_supervised
from ops.serving.supervisor import STABLE_S, backoff_s, child_environment
from ops.settings.administration import open_admin
from ops.settings.settings import Settings
from ops.settings.upstreams import EngineEntry
from tenants.audit.log import AuditLog
from tenants.directory.gateways import GatewayRegistry
from tenants.storage.database import open_database

COMMAND = (sys.executable, "-P", "-m", "ops.serving.processes.worker")

log = logging.getLogger("fairgate.workers")


async def run_workers(
    settings: Settings, pepper: bytes, doors: Sequence[Door], limits: OpenFiles, announce: Announce
) -> None:
    """Serves until a signal stops it. Raises `StartFailed`, and as `build` does."""
    stop = Stop()
    stop.at_signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last one until they are up
    async with contextlib.AsyncExitStack() as closing:
        database = open_database(settings.resolved_database_url)
        closing.push_async_callback(database.close)
        admin = open_admin(settings, pepper, database)
        await seed_prices(settings, admin)
        await audit_key.own(settings.data_dir, AuditLog(database))
        engines = await _open_engines(settings, stop, closing)
        # Sockets need a short path.
        shared = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="fairgate-")))
        seat = Seat(0, settings.workers, secrets.token_urlsafe(32), shared)
        keeper = await serve_keeper(seat.keeper, kept_limits(gateway_config(settings)))
        closing.callback(keeper.close)
        tally = Tally.create(seat.tally, seat.count + 1)
        workers = WorkerSet(Post(seat, settings, pepper, limits, engines, ()), doors, tally)
        stop.cut = workers.cut
        closing.push_async_callback(workers.close)
        await stop.first(workers.start())
        in_force = partial(GatewayRegistry(database).not_serving, settings.gateway.gateway_stale_s)
        async with announced(settings, pepper, seat.control_token, admin, doors[0], in_force, announce):
            await stop.asked.wait()


async def _open_engines(
    settings: Settings, stop: Stop, closing: contextlib.AsyncExitStack
) -> tuple[EngineEntry, ...]:
    """Those that the server runs itself, once one of them serves; for the workers they are elsewhere."""
    if not settings.engine.serve or run_elsewhere(settings):
        return ()
    owner = datadir.gateway_id(settings.data_dir)
    supervisors, engines = await open_supervised(
        # An id of its own: under the server's, a gateway's requests may be left to settle.
        engine_options(settings), settings.model.resolve().name, f"{owner}-supervisor", PLAIN_TEXT, closing
    )  # fmt: skip
    log.info("loading the model %s: half a minute or more", settings.model)
    await stop.first(supervisors.ready(MODEL_LOAD_S))
    # As the server calls them where it is one gateway (`gateway/cluster/recovery.py`).
    return tuple(EngineEntry(f"{engine.replica_id}@{owner}", engine.address) for engine in engines)


@dataclass(eq=False)
class _Worker:
    seat: int
    process: asyncio.subprocess.Process
    begun_s: float
    is_up: bool = False

    def drain(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class WorkerSet:
    """Use from one event loop."""

    def __init__(self, post: Post, doors: Sequence[Door], tally: Tally) -> None:
        """`post`: of any of them."""
        self._post = post
        self._tally = tally
        self._doors = doors
        self._spare = len(doors)
        """The seat that is free."""
        self._at: dict[int, _Worker] = {}
        """By door."""
        self._living: set[_Worker] = set()
        self._changing = [asyncio.Lock() for _ in doors]
        self._renewal = asyncio.Event()
        self._switched: set[signal.Signals] = set()
        """Signals that switched something, which is not as at the start."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Until all are up; from then on each is replaced when it ends. Raises `StartFailed`, `OSError`."""
        loop, doors = asyncio.get_running_loop(), range(len(self._doors))
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(number, self._switch, number)
        loop.add_signal_handler(signal.SIGHUP, self._renewal.set)
        self._at = dict(enumerate(await asyncio.gather(*(self._begin(door, door) for door in doors))))
        tasks = (*(self._keep(door) for door in doors), self._renew())
        self._tasks = [asyncio.create_task(task) for task in tasks]

    def cut(self) -> None:
        for worker in self._living:
            worker.send(signal.SIGINT)

    async def close(self) -> None:
        """Returns when all have drained."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._living:
            worker.drain()
        await asyncio.gather(*map(self._end_of, list(self._living)))

    async def _keep(self, door: int) -> None:
        """Replaces the worker at a door whenever it has ended."""
        failures = 0
        while True:
            worker = self._at[door]
            why = await self._end_of(worker)
            async with self._changing[door]:
                if time.monotonic() - worker.begun_s >= STABLE_S:
                    failures = 0
                while self._at[door] is worker:
                    failures += 1
                    wait_s = backoff_s(failures)
                    log.error("worker %d: %s; next start in %.1f s", worker.seat, why, wait_s)
                    await asyncio.sleep(wait_s)
                    try:
                        self._at[door] = await self._begin(door, worker.seat)
                    except (StartFailed, OSError) as error:
                        why = str(error)

    async def _renew(self) -> None:
        """Replaces all, one by one, at each SIGHUP."""
        while True:
            await self._renewal.wait()
            self._renewal.clear()
            log.info("SIGHUP: the workers are replaced, one by one")
            for door, changing in enumerate(self._changing):
                async with changing:
                    try:
                        new = await self._begin(door, self._spare)
                    except (StartFailed, OSError) as error:
                        log.error("no worker is replaced any more, as a new one does not start: %s", error)
                        break
                    old, self._at[door] = self._at[door], new
                    self._spare = old.seat
                log.info("worker %d takes the place of worker %d, which drains", new.seat, old.seat)
                old.drain()
                await self._end_of(old)
            else:
                log.info("all workers are replaced")

    async def _begin(self, door: int, seat: int) -> _Worker:
        """Returns when it serves. Raises `StartFailed`, `OSError`."""
        listeners = tuple(listener.fileno() for listener in self._doors[door].sockets)
        post = replace(self._post, seat=replace(self._post.seat, number=seat), listeners=listeners)
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=listeners,
            env=child_environment(),
            start_new_session=True,  # Ctrl-C is for the supervisor, which tells them
        )
        worker = _Worker(seat, process, time.monotonic())
        self._living.add(worker)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(pickle.dumps(post))
        said = (await process.stdout.readline()).decode().strip()
        if said != UP:
            why = await self._end_of(worker)
            raise StartFailed(said or why)
        worker.is_up = True
        for number in self._switched:
            worker.send(number)
        log.info("worker %d is up: process %d", seat, process.pid)
        return worker

    async def _end_of(self, worker: _Worker) -> str:
        """Waits for it; returns how it has ended."""
        code = await worker.process.wait()
        if worker in self._living:
            self._living.discard(worker)
            self._tally.clear(worker.seat)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"process {worker.process.pid} has ended by {how}"

    def _switch(self, number: signal.Signals) -> None:
        """What the signal switches, in all; a worker that comes later is switched, too."""
        self._switched ^= {number}
        if number is signal.SIGUSR1:
            switch_level(self._post.server)
        for worker in self._living:
            if worker.is_up:
                worker.send(number)
