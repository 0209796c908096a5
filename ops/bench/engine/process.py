"""Runs an engine in a process of its own for each run, so that the peak of memory is the run's own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

BENCH_DIR = Path(__file__).parents[1]
END_S = 20.0
STDERR_LINES = 8


class EngineFailed(Exception):
    """An engine's process failed or did not answer in time; the message has the end of its stderr."""


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    name: str
    command: tuple[str, ...]
    directory: Path
    options: dict[str, Any]


class EngineProcess:
    def __init__(
        self, launch: EngineLaunch, process: subprocess.Popen[str], stderr: IO[str], timeout_s: float
    ):
        self._name = launch.name
        self._process = process
        self._stderr = stderr
        self._timeout_s = timeout_s

    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        """Starts the engine; returns its name, version and settings. Raises `EngineFailed`."""
        about: dict[str, Any] = self._ask({"do": "load", **options})["about"]
        return about

    def run(self, orders: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Answers, and the use of the machine. Raises `EngineFailed`."""
        answer = self._ask({"do": "run", "requests": orders})
        return answer["answers"], answer["usage"]

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(self._timeout_s, give_up)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if late.is_set():
            raise EngineFailed(f"{self._name} gave no answer in {self._timeout_s:g} s")
        if not line:
            raise EngineFailed(f"{self._name} ended before it answered:\n{self._stderr_tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailed(f"{self._name}: {answer['error']}\n{self._stderr_tail()}")
        return answer

    def _stderr_tail(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._stderr.seek(0)
        return "\n".join(self._stderr.read().strip().splitlines()[-STDERR_LINES:])


@contextlib.contextmanager
def engine_process(launch: EngineLaunch, *, timeout_s: float) -> Iterator[EngineProcess]:
    """An engine's process, which ends with the block. Raises `EngineFailed`."""
    threads = str(launch.options["threads"])
    environment = os.environ | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "OPENVINO_TELEMETRY_ENABLED": "0",
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
        try:
            process = subprocess.Popen(
                launch.command,
                cwd=launch.directory,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            raise EngineFailed(f"{launch.name} cannot be started: {error}") from None
        try:
            yield EngineProcess(launch, process, stderr, timeout_s)
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
