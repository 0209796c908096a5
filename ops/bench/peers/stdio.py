"""Protocol of an engine's process: JSON lines, orders on stdin, one answer each on stdout.

Output of the engine's libraries goes to stderr.

    {"do": "load", "model_dir": ..., "dtype": "float32", "device": "cpu", "threads": 2, "max_sequences": 64,
     "max_batched_tokens": 512, "kv_tokens": 20000}                     -> {"about": {...}}
    {"do": "run", "requests": [{"prompt_token_ids": [...], "output_tokens": 9, "arrival_s": 0.0}, ...]}
                                                                        -> {"answers": [...], "usage": {...}}

An answer is `{"token_ids": [...], "token_s": [...]}`: a time for each token, in seconds since the run began.
A failure is answered with `{"error": ...}` and ends the process; so does the end of stdin.

Standard library only: this runs in environments that hold a peer and nothing else.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Any, Protocol


class Engine(Protocol):
    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        """Returns the engine's name, version and settings."""
        ...

    def run(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Serves the requests at their arrival times; one answer each, in the same order."""
        ...


class Stepped(Protocol):
    """An engine that is driven step by step, for `drive`."""

    def submit(self, index: int, request: dict[str, Any]) -> None: ...

    def has_work(self) -> bool: ...

    def step(self) -> list[tuple[int, list[int]]]:
        """One iteration; (request index, new token ids) of each request that got any."""
        ...


def serve(engine: Engine) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["do"] == "load":
                answer: dict[str, Any] = {"about": engine.load(order)}
            else:
                meter = ProcessMeter()
                tokens = engine.run(order["requests"])
                answer = {"answers": tokens, "usage": meter.read()}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if "error" in answer:
            _leave(1)
    _leave(0)


def _leave(code: int) -> None:
    """Ends the process without waiting for the threads of an engine's library."""
    sys.stderr.flush()
    os._exit(code)


def drive(engine: Stepped, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """While there is no work, the clock is set forward to the next arrival."""
    answers: list[dict[str, Any]] = [{"token_ids": [], "token_s": []} for _ in requests]
    ahead = deque(sorted(range(len(requests)), key=lambda index: requests[index]["arrival_s"]))
    started_s = time.perf_counter()
    while ahead or engine.has_work():
        now_s = time.perf_counter() - started_s
        while ahead and requests[ahead[0]]["arrival_s"] <= now_s:
            index = ahead.popleft()
            engine.submit(index, requests[index])
        if not engine.has_work():
            if ahead:
                started_s -= requests[ahead[0]]["arrival_s"] - now_s
            continue
        stepped = engine.step()
        at_s = time.perf_counter() - started_s
        for index, token_ids in stepped:
            answers[index]["token_ids"] += token_ids
            answers[index]["token_s"] += [at_s] * len(token_ids)
    return answers


class ProcessMeter:
    """Memory and processor time between its making and `read`."""

    def __init__(self) -> None:
        self._resets = _reset_peak()
        self._wall_s = time.perf_counter()
        self._own_s = time.process_time()
        self._busy_s = _machine_busy_s()

    def read(self) -> dict[str, Any]:
        """Peak resident bytes (while serving, and since the process began), and cores used."""
        wall_s = time.perf_counter() - self._wall_s
        own_s = time.process_time() - self._own_s
        busy_s = _machine_busy_s()
        others = None
        if busy_s is not None and self._busy_s is not None:
            others = max(0.0, (busy_s - self._busy_s - own_s) / wall_s)
        # ru_maxrss: kibibytes on Linux, bytes on a Mac. Linux: VmHWM can be reset, ru_maxrss cannot.
        unit = 1 if sys.platform == "darwin" else 1024
        since_start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {
            "serving_peak_bytes": _peak_bytes() if self._resets else None,
            "peak_bytes": since_start,
            "own_cores": own_s / wall_s,
            "other_cores": others,
        }


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _peak_bytes() -> int | None:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _machine_busy_s() -> float | None:
    """Processor seconds that all processes of the machine have used; None where /proc does not say."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _wait, interrupts, soft = (int(value) for value in first[1:8])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")
