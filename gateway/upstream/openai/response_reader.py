"""Incremental readers of a server's answer, with equal results: streamed or whole. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from gateway.upstream.answer_parts import Garbage
from gateway.upstream.base import Part
from gateway.upstream.http.sse import EventTooLarge, SseParser
from gateway.upstream.lease_buffer import BufferedChunk
from gateway.upstream.openai import response
from gateway.upstream.openai.response import DONE, Chunk, StreamError
from gateway.upstream.openai.token_count import TokenCount

MAX_UNCOUNTED = 256 * 1024
MAX_UNCOUNTED_PER_TOKEN = 256
"""Characters of annotations, ids and types, not counted as tokens; some servers repeat them."""


class CutShort(Exception):
    """The answer ended before its finish reason."""


class Echo:
    """The prompt at the start of a text completion (`echo`): passed with its log probabilities, never counted
    nor cut. If sent as token ids its text is unknown: all of the first chunk passes, the usage counts."""

    def __init__(self, prompt: str | Sequence[int] = "") -> None:
        """`prompt`: as it was sent; empty: none is asked for."""
        self._rest = prompt
        self.has_begun = False

    @property
    def is_expected(self) -> bool:
        return bool(self._rest)

    def split(self, chunk: Chunk, size: int) -> tuple[list[BufferedChunk], Chunk]:
        """A chunk's part of the prompt, and the chunk without it."""
        rest, text = self._rest, chunk.text
        if not rest or not (text or chunk.logprobs):
            return [], chunk
        length = len(text)
        if isinstance(rest, str) and not rest.startswith(text):
            length = len(rest) if text.startswith(rest) else 0
        self._rest = rest[length:] if isinstance(rest, str) and length == len(text) else ""
        self.has_begun = True
        echoed = BufferedChunk(0, text[:length], chunk.logprobs, size)
        return [echoed], replace(chunk, text=text[length:], logprobs=())


class ResponseReader(ABC):
    """Reads one answer. The results of `feed` and `close` may be passed on even after a `fault`."""

    content_type: str
    is_whole: bool

    def __init__(self, count: TokenCount, echo: Echo | None = None) -> None:
        self.count = count
        self._echo = echo or Echo()
        self.finish: str | None = None
        """None: not come yet."""
        self.finish_word = ""
        self.choice_fields: dict[str, Any] = {}
        """Sent with the finish reason, and beside its text so far."""
        self.fingerprint = ""
        self.is_complete = False
        self.fault: Exception | None = None
        """`Garbage`, `EventTooLarge`, `StreamError` or `CutShort`: why it ended early."""

    @property
    @abstractmethod
    def has_begun(self) -> bool: ...

    @abstractmethod
    def feed(self, data: bytes) -> Sequence[BufferedChunk]:
        """Takes a part of the body; returns its content."""

    @abstractmethod
    def close(self) -> Sequence[BufferedChunk]:
        """Call when the body has ended properly."""

    @property
    def is_overrun(self) -> bool:
        """The answer is complete for us, but the server goes on and must be stopped."""
        return self.count.is_overrun

    def _take_end(self, chunk: Chunk) -> None:
        self.fingerprint = chunk.fingerprint or self.fingerprint
        if chunk.finish is not None:
            self.finish, self.finish_word = response.finish_of(chunk.finish)
        if chunk.choice_fields:
            ids = self.choice_fields.get("token_ids", [])
            ids += chunk.choice_fields.get("token_ids", ())[: self.count.most - len(ids)]
            self.choice_fields |= chunk.choice_fields | ({"token_ids": ids} if ids else {})

    def _end_overrun(self) -> None:
        self.finish, self.finish_word, self.choice_fields = "length", "", {}
        self.is_complete = True

    def _pieces(self, chunk: Chunk, size: int) -> tuple[list[BufferedChunk], list[BufferedChunk]]:
        """A chunk's content within the requested tokens, and what is beyond them. Raises `Garbage`."""
        if not self._echo.is_expected:
            return _counted_pieces(chunk, self.count, size)
        echoed, chunk = self._echo.split(chunk, size)
        pieces, beyond = _counted_pieces(chunk, self.count, size)
        return echoed + pieces, beyond


class StreamedResponse(ResponseReader):
    """Reads server-sent events: a piece for each one with content."""

    content_type = "text/event-stream"
    is_whole = False

    def __init__(self, count: TokenCount, echo: Echo | None = None) -> None:
        super().__init__(count, echo)
        self._events = SseParser()
        self._beyond: list[BufferedChunk] = []
        """Text that does not fit, until the end shows whether the server stopped where it was to."""

    @property
    def has_begun(self) -> bool:
        return self.count.chunks > 0 or self._echo.has_begun

    def feed(self, data: bytes) -> Sequence[BufferedChunk]:
        pieces: list[BufferedChunk] = []
        count = self.count
        try:
            for event in self._events.feed(data):
                if event == DONE:
                    self._done()
                    break
                chunk = response.chunk(event)
                found, beyond = self._pieces(chunk, len(event))
                pieces += found
                if count.is_overrun:
                    self._end_overrun()
                    break
                self._beyond += beyond
                if chunk.finish is not None or chunk.choice_fields or chunk.fingerprint != self.fingerprint:
                    self._take_end(chunk)
                if chunk.finish is not None:
                    pieces += self._beyond
                    self._beyond.clear()
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


class WholeResponse(ResponseReader):
    """Reads one JSON body: nothing is known of it before its end."""

    content_type = "application/json"
    is_whole = True
    max_bytes = 8 * 2**20
    """Including its log probabilities."""

    def __init__(self, count: TokenCount, echo: Echo | None = None) -> None:
        super().__init__(count, echo)
        self._body = bytearray()

    @property
    def has_begun(self) -> bool:
        return bool(self._body) or self.count.chunks > 0

    def feed(self, data: bytes) -> Sequence[BufferedChunk]:
        self._body += data
        if len(self._body) > self.max_bytes:
            self.fault = Garbage(f"its answer is larger than {self.max_bytes} bytes")
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
        pieces, beyond = self._pieces(found, len(body))
        if found.finish is None:
            raise Garbage("its answer does not say how it ended")
        self._take_end(found)
        self.is_complete = True
        if self.is_overrun:
            self._end_overrun()
            return pieces
        return pieces + beyond


def _counted_pieces(
    chunk: Chunk, count: TokenCount, size: int
) -> tuple[list[BufferedChunk], list[BufferedChunk]]:
    tokens = count.saw(chunk)
    logprobs = count.fitting(chunk.logprobs) if chunk.logprobs else ()
    if chunk.before or chunk.after:
        if count.uncounted > MAX_UNCOUNTED + MAX_UNCOUNTED_PER_TOKEN * count.most:
            raise Garbage("it sends more annotations and ids than its answer can have")
        return _pieces_with_parts(chunk, count, BufferedChunk(tokens, "", logprobs, size))
    text, beyond = chunk.text, ""
    if count.fits is not None:
        text, beyond = text[: count.fits], text[count.fits :]
    return (
        [BufferedChunk(tokens, text, logprobs, size)] if tokens or text or logprobs else [],
        [BufferedChunk(0, beyond, (), len(beyond))] if beyond else [],
    )


def _pieces_with_parts(
    chunk: Chunk, count: TokenCount, first: BufferedChunk
) -> tuple[list[BufferedChunk], list[BufferedChunk]]:
    """The same of a chunk with parts; `first` has its tokens. A tool call's fragment fits whole or not."""
    within, beyond = [first], [BufferedChunk(0)]
    room = count.fits
    for part, length in zip((*chunk.before, None, *chunk.after), count.lengths, strict=True):
        # Without room, marks of a call that count for nothing do not overtake what stands before them.
        is_behind = room == 0 and part is not None and part.is_generated
        if room is None or (length <= room and not is_behind):
            _add(within, chunk.text if part is None else part.value)
            room = None if room is None else room - length
        elif part is None:
            _add(within, chunk.text[:room])
            _add(beyond, chunk.text[room:])
            room = 0
        elif part.is_plain:
            fitting, rest = part.cut(room)
            _add(within, fitting.value)
            _add(beyond, rest.value)
            room = 0
        else:
            _add(beyond, part.value)
            room = 0
    for piece in (*within[1:], *beyond):
        piece.size = first.size if piece.text or piece.parts else 0
    return (
        [piece for piece in within if piece.tokens or piece.text or piece.logprobs or piece.parts],
        [piece for piece in beyond if piece.text or piece.parts],
    )


def _add(pieces: list[BufferedChunk], content: str | Part) -> None:
    if isinstance(content, str):
        pieces[-1].text += content
        return
    if not any(content.values()) and "content" not in content:
        return
    if pieces[-1].text:
        pieces.append(BufferedChunk(0))
    pieces[-1].parts += (content,)
