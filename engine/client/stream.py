"""`EngineStream`: the deltas of one sequence for its reader.

Filled by the client's receive loop, which it never blocks. Its buffer is bounded: a reader that falls too far
behind gets what was emitted until then and a `SlowReader`; the sequence is cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from engine.messages import Delta, SequenceOutcome

MAX_BUFFERED_DELTAS = 1024


class EngineUnavailable(Exception):
    """There is no connection to an engine that serves; nothing was sent."""


class EngineRefused(EngineUnavailable):
    """The engine does not take this gateway. `code` is stable, `message` is for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class EngineLost(Exception):
    """The engine died, or forgot this gateway, while the sequence ran. It may have emitted more than
    `received_tokens`; if it lives, the sequence is cancelled, and `collect` returns the exact number."""

    def __init__(self, sequence_id: str, received_tokens: int, reason: str) -> None:
        super().__init__(f"sequence {sequence_id}: {reason} ({received_tokens} tokens received)")
        self.sequence_id = sequence_id
        self.received_tokens = received_tokens
        self.reason = reason


class SubmitRefused(Exception):
    """The sequence can never run; it left no outcome. `code` is stable, `message` is for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class SlowReader(Exception):
    """Raised after the last delta of a sequence that was cancelled because its reader fell too far behind."""

    def __init__(self, outcome: SequenceOutcome) -> None:
        super().__init__(
            f"sequence {outcome.sequence_id} was cancelled after {outcome.emitted_tokens} tokens: "
            "its reader was too slow"
        )
        self.outcome = outcome
        self.emitted_tokens = outcome.emitted_tokens


class EngineStream:
    """The deltas of one sequence, in order, for one reader. Iterating raises, after everything received,
    `SubmitRefused`, `EngineLost` or `SlowReader`; an exported sequence ends without an outcome."""

    def __init__(
        self,
        sequence_id: str,
        *,
        on_overflow: Callable[[str], None],
        received_tokens: int = 0,
        max_buffered_deltas: int = MAX_BUFFERED_DELTAS,
    ) -> None:
        self.sequence_id = sequence_id
        self.received_tokens = received_tokens
        """Tokens that reached this gateway, read or not."""
        self.outcome: SequenceOutcome | None = None
        self._on_overflow = on_overflow
        self._max_buffered_deltas = max_buffered_deltas
        self._buffer: deque[Delta] = deque()
        self._overflowed = False
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def buffered_deltas(self) -> int:
        return len(self._buffer)

    def push(self, delta: Delta) -> bool:
        """Appends the next delta; False, without appending, when tokens before it are missing."""
        if delta.token_ids:
            if delta.first_index != self.received_tokens:
                return False
            self.received_tokens += len(delta.token_ids)
        self._buffer.append(delta)
        if delta.outcome is not None:
            self.outcome = delta.outcome
            self.end(SlowReader(delta.outcome) if self._overflowed else None)
        elif len(self._buffer) > self._max_buffered_deltas and not self._overflowed:
            self._overflowed = True
            self._on_overflow(self.sequence_id)
        self._wake()
        return True

    def end(self, error: Exception | None) -> None:
        """Ends the stream: after what is buffered, the reader gets `error` or the normal end."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._wake()

    def lose(self, reason: str) -> None:
        self.end(EngineLost(self.sequence_id, self.received_tokens, reason))

    def __aiter__(self) -> EngineStream:
        return self

    async def __anext__(self) -> Delta:
        while not self._buffer:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError(f"sequence {self.sequence_id} has a reader already")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._buffer.popleft()

    async def drain(self) -> SequenceOutcome | None:
        """Skips to the outcome (None: exported). Raises as iterating does, but for `SlowReader`."""
        try:
            async for _ in self:
                pass
        except SlowReader as error:
            return error.outcome
        return self.outcome

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
