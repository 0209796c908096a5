"""The command `fairgate` in a process of its own, without paying for its imports each time.

Its imports, and the routes of a server, take a processor longer than most tests. One process for each part of
the suite makes them once; each `fairgate` that a test runs is a fork of it, with arguments, environment,
directory and files of its own, that runs `ops.cli.main.main` from its first line on.
`tests/e2e/test_cli_serve.py` and `test_demo.py` start the plain way, too.

As a program (`python -m tests.support.warm_command LISTENER`) this is that process.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "gateway.pools.peer_requests", "litestar.plugins.pydantic", "ops.serving.doctor", "ops.serving.serve",
    "pydantic.v1", "redis.asyncio", "tenants.quota.redis",
)  # fmt: skip
"""What commands import when they run, beside their own modules."""
COLD_GROUPS = ("bench", "simulate", "whatif", "engine", "demo", "plugin")
"""Commands whose modules are imported only where they are run."""
MOST_BYTES = 1 << 20
CLIENT = ROOT / "tests/support/warm_client.py"


class WarmCommand:
    """One running `fairgate`; its methods are those of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        stdout: int,
        stderr: int,
        env: Mapping[str, str],
        cwd: Path | None = None,
        own_group: bool = False,
        open_files: int | None = None,
    ) -> None:
        """`stdout` and `stderr` are open descriptors; the caller closes its own."""
        self.args = ["fairgate", *arguments]
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(str(_listener()))
        asked = {
            "arguments": list(arguments), "env": dict(env), "cwd": str(cwd or Path.cwd()),
            "own_group": own_group, "open_files": open_files,
        }  # fmt: skip
        with open(os.devnull, "rb") as nothing:
            socket.send_fds(
                self._connection, [json.dumps(asked).encode()], [nothing.fileno(), stdout, stderr]
            )
        self.pid = int(self._connection.recv(64))

    def poll(self) -> int | None:
        """Its exit code (a signal's is negative); None while it lives."""
        return self._exit_code(0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended. Raises subprocess.TimeoutExpired."""
        code = self._exit_code(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def send_signal(self, number: int) -> None:
        """While it lives."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once, if it lives."""
        self.send_signal(signal.SIGKILL)

    def _exit_code(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                told = self._connection.recv(64)
            except (TimeoutError, BlockingIOError):
                return None
            self._connection.close()
            self.returncode = int(told)
        return self.returncode


def fairgate(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, as `subprocess.run` does with captured texts. Without `env` it has this
    process's, less Fairgate's own variables. Raises subprocess.TimeoutExpired; then the command is ended."""
    if env is None:
        env = {name: value for name, value in os.environ.items() if not name.startswith("FAIRGATE_")}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        command = WarmCommand(arguments, stdout=out.fileno(), stderr=err.fileno(), env=env, cwd=cwd)
        try:
            code = command.wait(timeout)
        finally:
            command.kill()
        return subprocess.CompletedProcess(command.args, code, _text(out), _text(err))


def install(directory: Path) -> dict[str, str]:
    """Puts a program `fairgate` into a directory; returns the variables that it needs."""
    program = directory / "fairgate"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{CLIENT}" "$@"\n')
    program.chmod(0o755)
    return {"WARM_COMMAND": str(_listener())}


def program(tree: Path = ROOT) -> tuple[str, ...]:
    """`fairgate` of the code in `tree`, as the first words of a command."""
    return ("env", f"WARM_COMMAND={_listener(tree)}", sys.executable, "-I", "-S", str(CLIENT))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


@cache
def _listener(tree: Path = ROOT) -> Path:
    """The address of the process with the code in `tree` that is forked; started at the first use, ended with
    this one."""
    directory = tempfile.TemporaryDirectory(prefix="warm-command")
    address = Path(directory.name) / "listener"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(address))
    listener.listen(64)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FAIRGATE_")}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.support.warm_command", str(listener.fileno())],
        stdin=subprocess.PIPE, pass_fds=[listener.fileno()], cwd=ROOT, process_group=0,
        env=environment | {"PYTHONPATH": f"{tree}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    listener.close()

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        directory.cleanup()

    atexit.register(end)
    return address


def _main(listener: socket.socket) -> Callable[[], None]:
    """Forks on request until its standard input ends; returns only in a fork: what is to be run."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    waiting: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    for source in (listener, woken, 0):
        selector.register(source, selectors.EVENT_READ)
    while True:
        ready = {key.fileobj for key, _ in selector.select()}
        if 0 in ready:
            sys.exit(0)
        if woken in ready:
            os.read(woken, 4096)
            _reap(waiting)
        if listener in ready:
            connection, _ = listener.accept()
            text, files, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                selector.close()
                for each in (listener, connection, *waiting.values()):
                    each.close()
                os.close(woken)
                os.close(wake)
                return _prepared(json.loads(text), files)
            for descriptor in files:
                os.close(descriptor)
            connection.send(str(pid).encode())
            waiting[pid] = connection


def _reap(waiting: dict[int, socket.socket]) -> None:
    """Tells of each ended fork how it ended."""
    while waiting:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with waiting.pop(pid) as connection, suppress(OSError):  # a test that no longer listens
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _prepared(asked: dict[str, Any], files: list[int]) -> Callable[[], None]:
    """In the fork: takes over what was asked for."""
    if asked["own_group"]:
        os.setpgid(0, 0)
    for number, each in enumerate(files):
        os.dup2(each, number)
        os.close(each)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    if asked["open_files"] is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (asked["open_files"], asked["open_files"]))
    sys.argv = ["fairgate", *asked["arguments"]]
    return importlib.import_module("ops.cli.main").main  # type: ignore[no-any-return]


def _import_all() -> None:
    commands = importlib.import_module("ops.cli.main").OWN
    for name, where in commands.items():
        if where and name not in COLD_GROUPS:
            importlib.import_module(where.partition(":")[0])
    for module in MODULES:
        importlib.import_module(module)
    importlib.import_module("tests.support.shared_routes").registered()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _import_all()
    gc.collect()
    gc.freeze()
    run = _main(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
