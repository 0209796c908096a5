"""Limits that the supervisor keeps for all workers of one port: one answers for all, over a socket.

A frame is its length and a msgpack array: number, name and words of a question; number and seconds to wait of
an answer. Where there is none in time the worker asks its own object: it then counts for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

ANSWER_S = 0.5
AGAIN_S = 0.5
"""After a connection that failed; until then the worker's own object is asked."""
MAX_FRAME_BYTES = 4_096
MAX_CLIENTS = 256
MAX_WORD_CHARS = 128
MAX_UNSENT_BYTES = 2**16
"""Of one worker; then it asks its own object."""
LENGTH_BYTES = 2

Question = tuple[int, str, tuple[str, ...]]
Answer = tuple[int, float]
_questions = msgspec.msgpack.Decoder(Question)
_answers = msgspec.msgpack.Decoder(Answer)


async def serve_keeper(path: Path, limits: Mapping[str, Callable[..., float | None]]) -> asyncio.Server:
    """Answers by `limits`: what is counted at each call, and how many seconds to wait instead."""
    clients = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal clients
        clients += 1
        try:
            while clients <= MAX_CLIENTS:
                number, name, words = _questions.decode(await _read(reader))
                writer.write(_frame((number, limits[name](*words) or 0.0)))
                await writer.drain()
        except (OSError, EOFError, msgspec.DecodeError, KeyError, TypeError, ValueError):
            pass  # a worker that ended, or one that is not ours
        finally:
            clients -= 1
            writer.close()

    return await asyncio.start_unix_server(serve, path)


class Keeper:
    """The supervisor, as one worker asks it. `close` it when done."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[float]] = {}
        self._connecting = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._not_before_s = 0.0

    async def ask(self, name: str, *words: str) -> float | None:
        """Seconds to wait, 0: it may go on and is counted. None: no answer."""
        try:
            async with asyncio.timeout(ANSWER_S):
                if self._writer is None:
                    await self._connect()
                number = next(self._numbers)
                answered = self._open[number] = asyncio.get_running_loop().create_future()
                try:
                    return await answered if self._say(number, name, words) else None
                finally:
                    del self._open[number]
        except (OSError, EOFError, TimeoutError):
            return None

    def tell(self, name: str, *words: str) -> None:
        """As `ask`, for what needs no answer: after all that was asked before."""
        self._say(0, name, words)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _say(self, number: int, name: str, words: tuple[str, ...]) -> bool:
        writer = self._writer
        if writer is None or writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            return False
        writer.write(_frame((number, name, tuple(word[:MAX_WORD_CHARS] for word in words))))
        return True

    async def _connect(self) -> None:
        clock = asyncio.get_running_loop().time
        async with self._connecting:
            if self._writer is not None or clock() < self._not_before_s:
                return
            self._not_before_s = clock() + AGAIN_S
            reader, self._writer = await asyncio.open_unix_connection(self._path)
            self._task = asyncio.create_task(self._listen(reader), name="gateway keeper")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            with contextlib.suppress(OSError, EOFError, msgspec.DecodeError):
                while True:
                    number, wait_s = _answers.decode(await _read(reader))
                    if (waiting := self._open.get(number)) is not None and not waiting.done():
                        waiting.set_result(wait_s)
        finally:
            self.close()
            self._writer = None
            for waiting in self._open.values():
                if not waiting.done():
                    waiting.set_exception(EOFError())


def _frame(content: Question | Answer) -> bytes:
    packed = msgspec.msgpack.encode(content)
    return len(packed).to_bytes(LENGTH_BYTES) + packed


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Raises `EOFError`, `OSError`, `ValueError`."""
    num_bytes = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
    if num_bytes > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {num_bytes} bytes")
    return await reader.readexactly(num_bytes)
