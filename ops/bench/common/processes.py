"""How does a benchmark end a program that it started?"""

from __future__ import annotations

import asyncio

STOP_S = 10.0


async def end(process: asyncio.subprocess.Process) -> None:
    """Asks it to end, and makes it after `STOP_S`. Harmless when it has ended."""
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()
