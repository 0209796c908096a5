"""Supervises the engine process: adopts or starts it, and restarts it when it ends.

The engine runs in its own session and outlives the gateway. A living engine (the holder of the lock) with the
wanted options is adopted. When it ends, the client is notified, and it is restarted after a back-off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import site
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import engine
from engine.client.client import EngineClient
from engine.messages import PROTOCOL_VERSION, Ready
from engine.process.lock import LockContent, find_holder, lock_path, pid_namespace
from engine.process.options import MAX_SOCKET_PATH_BYTES, EngineOptions

FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0
STABLE_S = 30.0
"""An engine that ran this long resets the back-off when it dies."""
HANG_S = 120.0
"""An engine that served and then is silent for this time is killed."""
STOP_S = 10.0
POLL_S = 0.2
MAX_LOG_BYTES = 4 * 2**20
MAX_ERROR_CHARACTERS = 500

log = logging.getLogger("fairgate.supervise")


class EngineStartFailed(Exception):
    """The engine ended before it was ready; the message is its last line."""


class EnginePhase(StrEnum):
    """State of the supervised engine."""

    STOPPED = "stopped"
    RUNNING = "running"
    """The process lives; the client knows whether it serves."""
    BACKING_OFF = "backing_off"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    phase: EnginePhase
    pid: int | None
    adopted: bool
    """It was found alive, not started."""
    failures: int
    """How often in a row it died without having run for `STABLE_S`."""
    last_error: str
    """Why the last engine ended: its last line, if any."""
    log_path: Path


def engine_address(data_dir: Path, engine_id: str = "engine-0") -> str:
    """A Unix socket in `<data_dir>/run`, or, where that path is too long, in a private directory under the
    system's temporary one. The choice is kept in a file; the address of a living engine takes precedence."""
    data_dir = data_dir.resolve()
    holder = find_holder(lock_path(data_dir, engine_id))
    if holder is not None:
        return holder.address
    run_dir = data_dir / "run"
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    socket_path = run_dir / f"{engine_id}.sock"
    if len(os.fsencode(socket_path)) <= MAX_SOCKET_PATH_BYTES:
        return f"ipc://{socket_path}"
    note = run_dir / f"{engine_id}.address"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        noted = note.read_text(encoding="utf-8").strip()
        if _is_private_directory(Path(noted.removeprefix("ipc://")).parent):
            return noted
    address = f"ipc://{tempfile.mkdtemp(prefix='fairgate-')}/{engine_id}.sock"
    note.write_text(address + "\n", encoding="utf-8")
    return address


def backoff_s(failures: int) -> float:
    """Wait before the next start, after `failures` (>= 1) in a row."""
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 30))


class EngineSupervisor:
    """Supervises one engine for one gateway, on one asyncio loop."""

    def __init__(self, options: EngineOptions, client: EngineClient, *, hang_s: float = HANG_S) -> None:
        """`client` must speak to `options.address`; see `engine_address`."""
        self._options = options
        self._client = client
        self._hang_s = hang_s
        self._log_path = options.data_dir / "logs" / f"{options.engine_id}.log"
        self._task: asyncio.Task[None] | None = None
        self._process: _WatchedProcess | None = None
        self._ending = asyncio.Event()
        self._failed = asyncio.Event()
        self._phase = EnginePhase.STOPPED
        self._failures = 0
        self._last_error = ""

    @property
    def status(self) -> EngineStatus:
        process = self._process
        return EngineStatus(
            phase=self._phase,
            pid=process.pid if process else None,
            adopted=process.adopted if process else False,
            failures=self._failures,
            last_error=self._last_error,
            log_path=self._log_path,
        )

    async def start(self) -> None:
        """Adopts or starts the engine, and watches it; one with other options ends first. Raises `OSError`
        when the process or its log cannot be made. Call it before the client connects."""
        if self._task is not None:
            raise RuntimeError("the supervisor was started already")
        self._ending.clear()
        self._process = await self._adopt() or self._spawn()
        self._phase = EnginePhase.RUNNING
        self._task = asyncio.create_task(self._supervise(), name=f"supervise {self._options.engine_id}")

    async def ready(self, timeout_s: float = 120.0) -> Ready:
        """Connects the client and waits until the engine serves. Raises `EngineStartFailed` with its last
        line when it dies once, `EngineUnavailable` after `timeout_s`; supervision goes on in both cases."""
        self._failed.clear()
        connecting = asyncio.create_task(self._client.connect(timeout_s))
        failing = asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait({connecting, failing}, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                return connecting.result()
            raise EngineStartFailed(self._last_error)
        finally:
            for task in (connecting, failing):
                task.cancel()
            await asyncio.gather(connecting, failing, return_exceptions=True)

    async def stop(self) -> None:
        """Ends the engine: it drains for a moment and keeps unacknowledged outcomes in its file."""
        self._ending.set()
        process = self._process
        if process is not None:
            process.signal(signal.SIGTERM)
            if not await process.ended(STOP_S):
                log.error("engine %d does not stop: it is killed", process.pid)
                process.signal(signal.SIGKILL)
                await process.ended(STOP_S)
        await self._leave()

    async def detach(self) -> None:
        """Stops watching and lets the engine live, for the next gateway to adopt."""
        self._ending.set()
        await self._leave()

    async def _leave(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._process is not None:
            self._process.close()
            self._process = None
        self._phase = EnginePhase.STOPPED

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        while self._process is not None:
            process, started_s = self._process, loop.time()
            await self._watch(process)
            process.close()
            self._process = None
            self._client.mark_lost("the engine was stopped" if self._ending.is_set() else "the engine died")
            if self._ending.is_set():
                self._phase = EnginePhase.STOPPED
                return
            self._last_error = process.why_ended()
            self._failures = 1 if loop.time() - started_s >= STABLE_S else self._failures + 1
            wait_s = backoff_s(self._failures)
            self._phase = EnginePhase.BACKING_OFF
            self._failed.set()
            log.error("engine %d: %s; next start in %.1f s", process.pid, self._last_error, wait_s)
            await asyncio.sleep(wait_s)
            while self._process is None:
                try:
                    self._process = await self._adopt() or self._spawn()
                except OSError as error:
                    self._last_error = f"the engine cannot be started: {error}"
                    log.error("%s", self._last_error)
                    await asyncio.sleep(MAX_BACKOFF_S)
            self._phase = EnginePhase.RUNNING

    async def _watch(self, process: _WatchedProcess) -> None:
        """Returns when the process has ended; ends it when it hangs."""
        loop = asyncio.get_running_loop()
        served_s: float | None = None
        while not await process.ended(1.0):
            if self._client.is_up and self._client.ready is not None:
                if self._client.ready.pid == process.pid:
                    served_s = loop.time()
            elif not self._client.is_connecting:
                served_s = None
            elif served_s is not None and loop.time() - served_s > self._hang_s:
                log.error("engine %d was not heard for %.0f s: it is killed", process.pid, self._hang_s)
                process.signal(signal.SIGKILL)
                served_s = None

    async def _adopt(self) -> _WatchedProcess | None:
        """The living engine with the wanted options; another one is ended."""
        path = lock_path(self._options.data_dir, self._options.engine_id)
        holder = find_holder(path)
        if holder is None:
            return None
        if holder.pid_namespace != pid_namespace():
            log.warning("engine %d holds %s from another container: it cannot be adopted", holder.pid, path)
            return None
        process = _WatchedProcess.adopt(holder, self._log_path)
        # Another process may have got the number meanwhile: only the lock is proof.
        if process is None or find_holder(path) != holder:
            return None
        if self._is_wanted(holder):
            log.info("engine %d lives at %s: adopted", holder.pid, holder.address)
            return process
        log.warning("engine %d runs with other options: it is replaced", holder.pid)
        process.signal(signal.SIGTERM)
        if not await process.ended(STOP_S):
            process.signal(signal.SIGKILL)
            await process.ended(STOP_S)
        process.close()
        return None

    def _is_wanted(self, holder: LockContent) -> bool:
        return holder.arguments == self._options.arguments() and holder.protocol_version == PROTOCOL_VERSION

    def _spawn(self) -> _WatchedProcess:
        self._log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._log_path.exists() and self._log_path.stat().st_size > MAX_LOG_BYTES:
            self._log_path.replace(self._log_path.with_suffix(".log.1"))
        process = _WatchedProcess.spawn([*_interpreter(), *self._options.arguments()], self._log_path)
        log.info("engine %d started", process.pid)
        return process


def child_environment() -> dict[str, str]:
    """Of a process of ours that `python -P` runs, wherever the packages are."""
    root, path = str(Path(engine.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")
    is_installed = root in site.getsitepackages()
    return os.environ | ({} if is_installed else {"PYTHONPATH": os.pathsep.join(filter(None, [root, path]))})


class _WatchedProcess:
    """A process that is watched by its descriptor, so that it need not be a child of ours."""

    def __init__(self, pid: int, child: subprocess.Popen[bytes] | None, log_path: Path) -> None:
        """Raises `ProcessLookupError` when there is no such process."""
        self.pid = pid
        self.adopted = child is None
        self._child = child
        self._log_path = log_path
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._descriptor: int | None = None
        self._poll: asyncio.TimerHandle | None = None
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except (AttributeError, OSError):  # a system without pidfd
            self._look()
        else:
            self._loop.add_reader(self._descriptor, self._ended)

    @staticmethod
    def adopt(holder: LockContent, log_path: Path) -> _WatchedProcess | None:
        try:
            return _WatchedProcess(holder.pid, None, log_path)
        except ProcessLookupError:
            return None

    @staticmethod
    def spawn(command: list[str], log_path: Path) -> _WatchedProcess:
        # The engine needs none of the gateway's secrets (pepper, database URL).
        environment = {k: v for k, v in child_environment().items() if not k.startswith("FAIRGATE_")}
        with open(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
            return _WatchedProcess(child.pid, child, log_path)

    async def ended(self, timeout_s: float) -> bool:
        """Waits; returns whether the process has ended."""
        await asyncio.wait({self._end}, timeout=timeout_s)
        return self._end.done()

    def signal(self, number: signal.Signals) -> None:
        """Signals the process, never another that got its number."""
        with contextlib.suppress(ProcessLookupError):
            if self._end.done():
                return
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, number)
            else:
                os.kill(self.pid, number)

    def why_ended(self) -> str:
        """Its last line, unless a signal ended it."""
        code = self._child.poll() if self._child is not None else None
        if code is not None and code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        if code is None:
            return "it ended; it was adopted, so its exit code is not known"
        return self._last_line() or f"it ended with exit code {code}"

    def close(self) -> None:
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
        if self._poll is not None:
            self._poll.cancel()
        if self._child is not None and self._child.poll() is None:
            self._child.returncode = 0  # it lives on by intent: no ResourceWarning

    def _last_line(self) -> str:
        try:
            with self._log_path.open("rb") as file:
                file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - 8 * MAX_ERROR_CHARACTERS))
                lines = file.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return last.removeprefix("fairgate engine: ")[:MAX_ERROR_CHARACTERS]

    def _ended(self) -> None:
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
        if self._child is not None:
            self._child.wait()
        if not self._end.done():
            self._end.set_result(None)

    def _look(self) -> None:
        if _is_gone(self.pid, self._child):
            self._ended()
        else:
            self._poll = self._loop.call_later(POLL_S, self._look)


def _interpreter() -> list[str]:
    # -P: the working directory may hold a folder with the name of one of our packages.
    return [sys.executable, "-P", "-m", "engine.process.server"]


def _is_gone(pid: int, child: subprocess.Popen[bytes] | None) -> bool:
    if child is not None:
        return child.poll() is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _is_private_directory(path: Path) -> bool:
    """Whether only this user can have put a socket there."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
