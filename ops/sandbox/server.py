"""Runs a private Fairgate server for a program (demo, benchmarks).

A real `fairgate serve` on a free port, with its own data directory and process group: Ctrl-C reaches only the
program that started it, which then ends the server in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from gateway.flow.dispatch_log import LogRecord
from ops.serving import datadir

START_S = 180.0
STOP_S = 40.0
LOG_PAGE = 2000
POLL_S = 0.1
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (sys.executable, "-P", "-m", "ops.cli.main")
"""`fairgate` of this code."""


class ServerFailed(Exception):
    """The server did not start, or does not answer; the message is its last word."""


@dataclass(frozen=True)
class LocalServer:
    url: str
    docs_url: str
    model: str
    data_dir: Path
    owner_key: str | None
    control_token: str
    process: asyncio.subprocess.Process

    def operator(self) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.control_token}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=30.0)


@contextlib.asynccontextmanager
async def local_server(
    data_dir: Path, *, arguments: Sequence[str] = (), port: int = 0, program: Sequence[str] = PROGRAM
) -> AsyncIterator[LocalServer]:
    """Runs a server, with its engine, in the block. Raises `ServerFailed`."""
    datadir.ensure(data_dir)
    log_path = data_dir / "serve.log"
    command = [*program, "serve", "--json", "--port", str(port)]
    command += ["--data-dir", str(data_dir), *arguments]
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=environment(),
            # Not a session: Linux gives sessions their turns first (autogroup), where one that is always busy
            # was seen to keep another waiting for seconds.
            process_group=0,
        )
    try:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                line = await process.stdout.readline()
        except TimeoutError:
            raise ServerFailed(f"the server is not up after {START_S:g} s; see {log_path}") from None
        if not line:
            raise ServerFailed(_last_line(log_path))
        started = json.loads(line)
        server = datadir.read_server_file(data_dir)
        if server is None:
            raise ServerFailed(f"the server left no {data_dir}/run/server.json")
        yield LocalServer(
            url=started["url"],
            docs_url=started["docs_url"],
            model=started["model"],
            data_dir=data_dir,
            owner_key=_owner_key(started["owner_key_file"]),
            control_token=server.control_token,
            process=process,
        )
    finally:
        await _end(process)


async def until(condition: Callable[[], Any], within_s: float) -> bool:
    """Polls `condition`, which other processes change; returns whether it held within `within_s`."""
    end_s = time.monotonic() + within_s
    while not await condition():
        if time.monotonic() > end_s:
            return False
        await asyncio.sleep(POLL_S)
    return True


def _owner_key(path: str | None) -> str | None:
    return None if path is None else Path(path).read_text().strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, twice at most (the second cuts what still runs), then SIGKILL."""
    for number, patience_s in ((signal.SIGTERM, STOP_S), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), patience_s)


def environment() -> dict[str, str]:
    """Ours without settings: the server is configured by its arguments alone."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FAIRGATE_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    return environment


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"the server ended without a word; see {path}"


class LogReader:
    """Reads the dispatch log page by page, so that nothing is lost when the server's own is bounded."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.records: list[LogRecord] = []
        self.lost = 0
        """Records that the server dropped before they were read."""
        self._client = client
        self._next = 0

    async def read(self) -> None:
        while True:
            response = await self._client.get(
                "/admin/v1/dispatch-log", params={"since": self._next, "limit": LOG_PAGE}
            )
            response.raise_for_status()
            page: dict[str, Any] = response.json()
            self.lost += max(0, page["first_index"] - self._next)
            self.records += [msgspec.convert(item, LogRecord) for item in page["records"]]
            if page["next_index"] <= self._next:
                return
            self._next = page["next_index"]
            if len(page["records"]) < LOG_PAGE:
                return
