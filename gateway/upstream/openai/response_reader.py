"""Incremental readers of a server's answer: streamed or whole.

Two readers with equal results: `StreamedResponse` takes server-sent events as they come, `WholeResponse` one
JSON body. Pure: bytes in, pieces out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gateway.upstream.http.sse import EventTooLarge, SseParser
from gateway.upstream.lease_buffer import BufferedChunk
from gateway.upstream.openai import response
from gateway.upstream.openai.response import DONE, Chunk, Garbage, StreamError
from gateway.upstream.openai.token_count import TokenCount

MAX_WHOLE_BYTES = 8 * 2**20
"""Limit of a whole answer, its log probabilities included."""


class CutShort(Exception):
    """The answer ended before its finish reason."""


class ResponseReader(Protocol):
    """Reads one answer. The results of `feed` and `close` may be passed on, also where `fault` is set after
    them."""

    @property
    def content_type(self) -> str:
        """The content type that the server must send."""
        ...

    @property
    def is_whole(self) -> bool:
        """Nothing of it comes before its end."""
        ...

    @property
    def count(self) -> TokenCount:
        """Tokens so far."""
        ...

    @property
    def finish(self) -> str | None:
        """Our finish reason; None: not come yet."""
        ...

    @property
    def is_complete(self) -> bool:
        """Nothing more of it will be read."""
        ...

    @property
    def is_overrun(self) -> bool:
        """The server ignores where it was to stop: the answer is complete for us, and the server must be
        stopped."""
        ...

    @property
    def has_begun(self) -> bool:
        """Something of it was generated and has come."""
        ...

    @property
    def fault(self) -> Exception | None:
        """`Garbage`, `EventTooLarge`, `StreamError` or `CutShort`: why it ended early."""
        ...

    def feed(self, data: bytes) -> Sequence[BufferedChunk]:
        """Takes a part of the body; returns its content."""
        ...

    def close(self) -> Sequence[BufferedChunk]:
        """The body has ended properly."""
        ...


class StreamedResponse:
    """Implements `ResponseReader` for server-sent events: a piece for each one with content."""

    content_type = "text/event-stream"
    is_whole = False

    def __init__(self, count: TokenCount) -> None:
        self.count = count
        self.finish: str | None = None
        self.is_complete = False
        self.is_overrun = False
        self.fault: Exception | None = None
        self._events = SseParser()

    @property
    def has_begun(self) -> bool:
        return self.count.chunks > 0

    def feed(self, data: bytes) -> Sequence[BufferedChunk]:
        pieces: list[BufferedChunk] = []
        count = self.count
        try:
            for event in self._events.feed(data):
                if event == DONE:
                    self._done()
                    break
                chunk = response.chunk(event)
                tokens = count.saw(chunk)
                if tokens or chunk.text or chunk.logprobs:
                    pieces.append(BufferedChunk(tokens, chunk.text, chunk.logprobs, len(event)))
                if chunk.finish is not None:
                    self.finish = response.finish_of(chunk.finish)
                elif count.is_overrun:
                    self.finish = "length"
                    self.is_complete = self.is_overrun = True
                    break
        except (Garbage, EventTooLarge, StreamError) as error:
            self.fault = error
        return pieces

    def close(self) -> Sequence[BufferedChunk]:
        if self.finish is None or not self._events.is_between_events:
            self.fault = CutShort()
        else:
            self.is_complete = True
        return ()

    def _done(self) -> None:
        if self.finish is None:
            raise Garbage("the stream is done and no choice has ended")
        self.is_complete = True


class WholeResponse:
    """Implements `ResponseReader` for one JSON body: nothing is known of it before its end."""

    content_type = "application/json"
    is_whole = True
    is_overrun = False

    def __init__(self, count: TokenCount) -> None:
        self.count = count
        self.finish: str | None = None
        self.is_complete = False
        self.fault: Exception | None = None
        self._body = bytearray()

    @property
    def has_begun(self) -> bool:
        return bool(self._body) or self.count.chunks > 0

    def feed(self, data: bytes) -> Sequence[BufferedChunk]:
        self._body += data
        if len(self._body) > MAX_WHOLE_BYTES:
            self.fault = Garbage(f"its answer is larger than {MAX_WHOLE_BYTES} bytes")
        return ()

    def close(self) -> Sequence[BufferedChunk]:
        body, self._body = self._body, bytearray()
        try:
            return self._read(bytes(body))
        except (Garbage, StreamError) as error:
            self.fault = error
            return ()

    def _read(self, body: bytes) -> Sequence[BufferedChunk]:
        found: Chunk = response.chunk(body)
        tokens = self.count.saw(found)
        if found.finish is None:
            raise Garbage("its answer does not say how it ended")
        self.finish = response.finish_of(found.finish)
        self.is_complete = True
        if not (tokens or found.text or found.logprobs):
            return ()
        return (BufferedChunk(tokens, found.text, found.logprobs, len(body)),)
