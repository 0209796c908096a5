"""Ends a program that a benchmark started."""

from __future__ import annotations

import asyncio

STOP_S = 10.0


async def end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, and SIGKILL after `STOP_S`. Idempotent."""
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()
