"""The process that replays queues for all pools of a gateway (`engine/forecast/wait/worker.py`).

It starts with the first picture and ends with the gateway. If it dies or takes too long, the pool that asked
goes on with its last surface, and the next picture starts another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import sys
from asyncio.subprocess import PIPE, Process

from engine.forecast.wait import worker
from engine.forecast.wait.picture import Picture
from engine.forecast.wait.surface import Surface

LONGEST_S = 20.0
"""A replay that takes longer is of no use any more."""
START_AGAIN_S = 5.0

log = logging.getLogger("fairgate.gateway.estimates")


class ReplayProcess:
    """Use from one event loop."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._not_before_s = float("-inf")

    def submit(self, picture: Picture) -> asyncio.Task[Surface]:
        """The task raises `RuntimeError`. The picture is copied now."""
        return asyncio.create_task(self._surface(pickle.dumps(picture)), name="replay")

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _surface(self, content: bytes) -> Surface:
        async with self._turn:
            try:
                async with asyncio.timeout(LONGEST_S):
                    answer = await self._ask(content)
            except (OSError, EOFError, TimeoutError) as error:
                await self.close()
                self._not_before_s = asyncio.get_running_loop().time() + START_AGAIN_S
                log.warning("the process that replays queues failed, and is started again: %r", error)
                raise RuntimeError(str(error)) from error
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    async def _ask(self, content: bytes) -> Surface | str:
        if self._process is None or self._process.returncode is not None:
            wait_s = self._not_before_s - asyncio.get_running_loop().time()
            await asyncio.sleep(max(0.0, wait_s))
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", worker.__name__, stdin=PIPE, stdout=PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
        sent, received = self._process.stdin, self._process.stdout
        assert sent is not None
        assert received is not None
        sent.write(worker.HEADER.pack(len(content)) + content)
        await sent.drain()
        (length,) = worker.HEADER.unpack(await received.readexactly(worker.HEADER.size))
        answer: Surface | str = pickle.loads(await received.readexactly(length))
        return answer
