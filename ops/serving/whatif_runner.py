"""What-ifs of the console: `fairgate whatif` in a child process of the server, one at a time.

The child is nice, bounded in time and memory, writes nothing, and ends with its server, which closes its
standard input (`ops/cli/simulate/child.py`). Progress comes on stderr, the report on stdout.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gateway.domain.what_if import RunState, WhatIfAsked, WhatIfBusy, WhatIfRun
from ops.settings.settings import Settings
from tenants.config_file.export import as_yaml

COMMAND = (sys.executable, "-m", "ops.cli.simulate.child")
KEPT_RUNS = 10
MOST_S = 1_800.0
"""Of one run."""
MOST_REPORT_BYTES = 32 * 2**20
MOST_ERROR_CHARACTERS = 4_000
END_S = 5.0
"""A child that does not end when asked is killed after this."""

log = logging.getLogger("fairgate.whatif")


class WhatIfFailed(Exception):
    """The child gave no report; the message is for people."""


class WhatIfRunner:
    """Implements `WhatIf`. Use from one event loop."""

    def __init__(
        self,
        settings: Settings,
        *,
        command: Sequence[str] = COMMAND,
        most_s: float = MOST_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._environment = environment_of(settings, os.environ)
        self._command = command
        self._most_s = most_s
        self._wall_clock = wall_clock
        self._runs: deque[WhatIfRun] = deque(maxlen=KEPT_RUNS)
        self._working: asyncio.Task[None] | None = None

    def runs(self) -> list[WhatIfRun]:
        return list(self._runs)

    def run(self, run_id: str) -> WhatIfRun | None:
        return next((run for run in self._runs if run.run_id == run_id), None)

    async def start(self, asked: WhatIfAsked, by: str) -> WhatIfRun:
        """Begins a run. Raises `WhatIfBusy`."""
        if self._working is not None and not self._working.done():
            raise WhatIfBusy
        run = WhatIfRun(secrets.token_hex(8), asked, by, self._now_us())
        self._runs.appendleft(run)
        self._working = asyncio.create_task(self._work(run), name="what-if")
        return run

    async def cancel(self, run_id: str) -> None:
        """Ends a run that is under way; does nothing for others."""
        run, working = self.run(run_id), self._working
        if run is not None and run.state is RunState.RUNNING and working is not None:
            working.cancel()
            await asyncio.wait([working])
            if run.state is RunState.RUNNING:  # cancelled before it began
                self._end_run(run, RunState.CANCELLED)

    async def close(self) -> None:
        for run in self._runs:
            await self.cancel(run.run_id)

    def _now_us(self) -> int:
        return round(self._wall_clock() * 1e6)

    async def _work(self, run: WhatIfRun) -> None:
        state = RunState.FAILED
        try:
            async with asyncio.timeout(self._most_s):
                run.report = await self._report(run)
            state, run.part = RunState.DONE, 1.0
        except asyncio.CancelledError:
            state = RunState.CANCELLED
        except TimeoutError:
            run.error = f"It took more than {self._most_s:g} s: take a shorter time, or fewer requests."
        except WhatIfFailed as error:
            run.error = str(error)
        except Exception:
            log.exception("what-if %s", run.run_id)
            run.error = "It could not be run; the server's log says why."
        self._end_run(run, state)

    def _end_run(self, run: WhatIfRun, state: RunState) -> None:
        run.ended_us = self._now_us()
        run.state = state

    async def _report(self, run: WhatIfRun) -> Mapping[str, object]:
        """Raises `WhatIfFailed`, `OSError`."""
        with tempfile.TemporaryDirectory(prefix="fairgate-whatif-") as folder:
            limits = Path(folder) / "limits.yaml"
            if run.asked.limits:
                limits.write_text(as_yaml(run.asked.file()), encoding="utf-8")
            process = await asyncio.create_subprocess_exec(
                *self._command,
                *run.asked.flags(str(limits)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environment,
            )
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                report, said = await asyncio.gather(_all(process.stdout), _said(process.stderr, run))
                code = await process.wait()
            finally:
                await _end(process)
        if code != 0:
            raise WhatIfFailed(said or f"It ended with exit code {code}: perhaps it needed too much memory.")
        document: Mapping[str, object] = json.loads(report)
        return document


def environment_of(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environment.items() if not name.startswith("FAIRGATE_")}
    kept["FAIRGATE_DATA_DIR"] = str(Path(settings.data_dir).absolute())
    if settings.database_url:
        kept["FAIRGATE_DATABASE_URL"] = settings.database_url
    return kept


async def _all(stream: asyncio.StreamReader) -> bytes:
    """Raises `WhatIfFailed` for too much."""
    content = bytearray()
    while part := await stream.read(65_536):
        content += part
        if len(content) > MOST_REPORT_BYTES:
            raise WhatIfFailed("Its report is too long: compare fewer policies.")
    return bytes(content)


async def _said(stream: asyncio.StreamReader, run: WhatIfRun) -> str:
    """Copies progress into the run; returns why it is refused, or the end of all other output."""
    lines: list[str] = []
    refused = ""
    async for line in stream:
        text = line.decode(errors="replace").rstrip()
        if text.startswith("{"):
            with contextlib.suppress(ValueError, KeyError, TypeError, ZeroDivisionError):
                progress = json.loads(text)
                if "refused" in progress:
                    refused = progress["refused"]
                    continue
                run.policy, run.number = progress["policy"], progress["number"]
                run.part = progress["done"] / progress["total"]
                continue
        lines.append(text)
        del lines[:-100]
    return refused or _words(lines)


def _words(lines: Sequence[str]) -> str:
    """The command's error without its usage."""
    start = next((number for number, text in enumerate(lines) if text.startswith("Error: ")), 0)
    text = "\n".join(lines[start:]).removeprefix("Error: ").strip()
    return text[-MOST_ERROR_CHARACTERS:]


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), END_S)
    except TimeoutError:
        process.kill()
        await process.wait()
