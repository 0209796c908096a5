"""Owner of one engine process on a machine of a cluster: each of the two ends with the other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from engine.client.client import EngineClient, EngineRefused, EngineUnavailable
from engine.client.keys import KeysRefused, gateway_keys
from ops.placement.plan import Report

CONNECT_S = 1.0
STOP_S = 15.0
PAUSE_S = 10.0
"""Between two attempts to start an engine that did not serve; meanwhile its last words can be read."""
MAX_LOG_BYTES = 4 * 2**20
MAX_WORDS_BYTES = 500
UNHEARD_S = 3600
"""Of `engine.orphan_s`: what was placed goes on while no gateway is there."""
LOW_PRIORITY = (
    "Ray gave its worker a niceness that this system does not let it reset, and the engine would inherit it:"
    " start Ray with RAY_worker_niceness=0"
)
# Ends with the thread that started it, then becomes the engine.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.executable, [sys.executable, "-P", "-m", "ops.cli.main", "engine", *sys.argv[2:]])
"""


class EngineHost:
    """Starts its engine at once. When that ends, `leave` ends this process, for Ray to start both anew."""

    def __init__(
        self,
        name: str,
        host: str,
        data_dir: Path,
        environment: Mapping[str, str],
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        """`host`: address of this machine for gateways. `environment`: variables of the engine, beside those
        that are set here."""
        with socket.socket() as probe:
            probe.bind((host, 0))
            self.address = f"tcp://{host}:{probe.getsockname()[1]}"
        self._name, self._host, self._data_dir, self._leave = name, host, data_dir, leave
        self._environment = {**os.environ, **environment, "FAIRGATE_ENGINE_ORPHAN_S": str(UNHEARD_S)}
        self._client: EngineClient | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._why = ""
        self._is_ending = False
        threading.Thread(target=self._own, daemon=True, name=f"engine {name}").start()

    async def report(self) -> Report:
        """Whether the engine serves, by its own `Ready` over the link."""
        why = self._why
        if not why:
            try:
                if self._client is None:
                    keys = gateway_keys(self.address, self._data_dir)
                    self._client = EngineClient(self.address, f"placer-{self._name}", keys=keys)
                await self._client.connect(CONNECT_S)
                return Report(self.address, self._host, is_serving=True)
            except (KeysRefused, EngineRefused) as error:
                why = str(error)
            except EngineUnavailable:
                pass
        return Report(self.address, self._host, why=why)

    async def end(self) -> None:
        """Ends the engine for good; the caller ends this process."""
        self._is_ending = True
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, STOP_S)
            self._process.kill()

    def _own(self) -> None:
        """The thread that the engine ends with."""
        try:
            os.setpriority(os.PRIO_PROCESS, 0, 0)  # of this thread, from which the engine inherits it
            self._why = self._run()
        except PermissionError:
            self._why = LOW_PRIORITY
        except OSError as error:
            self._why = f"the engine cannot be started: {error}"
        if self._client is None or self._client.ready is None:
            time.sleep(PAUSE_S)
        if not self._is_ending:
            self._leave(1)

    def _run(self) -> str:
        """Runs the engine; returns its last line."""
        path = self._data_dir / "logs" / f"{self._name}.log"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        options = ["--address", self.address, "--engine-id", self._name, "--data-dir", str(self._data_dir)]
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+b") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _LAUNCHER, str(os.getpid()), *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
            )
            code = self._process.wait()
            output.seek(max(0, output.seek(0, os.SEEK_END) - MAX_WORDS_BYTES))
            lines = output.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return last.removeprefix("fairgate engine: ") or f"the engine ended with exit code {code}"
