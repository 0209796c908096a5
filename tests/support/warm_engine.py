"""A real engine process without paying for its imports each time.

torch and transformers take longer to import than most tests take. A server of the standard library's
`multiprocessing` imports them once in each part of the suite, and every engine is a copy of it that runs
`engine.process.server` from its first line on, in a session and with options of its own. Who looks for it
finds what a started one leaves: a lock, an address, a log.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from engine.process.lock import find_holder, lock_path
from engine.process.options import EngineOptions
from engine.process.server import run_engine

START_S = 60.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.engine_imports", "tests.support.warm_engine"])


class WarmEngine:
    """One engine process; its methods are those of `subprocess.Popen` that tests use."""

    def __init__(
        self, options: EngineOptions, log_path: Path, run: Callable[[EngineOptions], int] = run_engine
    ) -> None:
        """Starts it; what it says is appended to `log_path`. `run`: a function of a module, which a test
        gives that breaks something beforehand."""
        log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A daemon: whatever a test forgets ends with the suite.
        self._process = _context.Process(target=_run, args=(options, log_path, run), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Its exit code (a signal's is negative); None while it lives."""
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code, when it has ended."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """While it lives."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once, if it lives."""
        self._process.kill()

    def wait_until_it_holds(self, lock: Path) -> bool:
        """Until it is what a supervisor would find there; False when it ended instead."""
        never = threading.Event()
        end_s = time.monotonic() + START_S
        while find_holder(lock) is None:
            if self.poll() is not None:
                return False
            assert time.monotonic() < end_s, "the engine did not take its lock in time"
            never.wait(0.01)
        return True


def engine_to_adopt(options: EngineOptions) -> WarmEngine | None:
    """Starts the engine that a server with these options will look for; None when one lives already, or
    cannot be started (which the server then finds out for itself)."""
    lock = lock_path(options.data_dir, options.engine_id)
    if find_holder(lock) is not None:
        return None
    engine = WarmEngine(options, options.data_dir / "logs" / f"{options.engine_id}.log")
    return engine if engine.wait_until_it_holds(lock) else None


def _run(options: EngineOptions, log_path: Path, run: Callable[[EngineOptions], int]) -> None:
    os.setsid()
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.exit(run(options))
