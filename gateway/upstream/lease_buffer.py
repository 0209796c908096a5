"""Holds back tokens of another server until their lease covers them. Pure.

Other servers know no leases. What is uncovered when the budget is spent is dropped: neither delivered nor
charged. Of a partly covered piece the tokens count, its text waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.messages import TokenLogprob
from gateway.upstream.base import Part


@dataclass(slots=True)
class BufferedChunk:
    """The content of one chunk; `tokens` of it are not passed on yet."""

    tokens: int
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()
    size: int = 0
    """In bytes: roughly its memory."""
    parts: tuple[Part, ...] = ()
    """What is not plain text; comes before `text`."""


def joined(pieces: Sequence[BufferedChunk]) -> BufferedChunk:
    """Only the last piece may have text before others' parts (`runs`)."""
    return BufferedChunk(
        sum(piece.tokens for piece in pieces),
        "".join([piece.text for piece in pieces]),
        [logprob for piece in pieces for logprob in piece.logprobs],
        sum(piece.size for piece in pieces),
        tuple(part for piece in pieces for part in piece.parts),
    )


def runs(pieces: Sequence[BufferedChunk]) -> list[BufferedChunk]:
    """As few pieces as keep the order: in one chunk text stands after parts."""
    chunks: list[BufferedChunk] = []
    run: list[BufferedChunk] = []
    has_text = False
    for piece in pieces:
        if piece.parts and has_text:
            chunks.append(joined(run))
            run, has_text = [], False
        run.append(piece)
        has_text = has_text or bool(piece.text)
    if run:
        chunks.append(run[0] if len(run) == 1 else joined(run))
    return chunks


@dataclass(frozen=True, slots=True)
class End:
    """How a sequence ended, and its real token count."""

    finish: str
    tokens: int
    basis: str


class LeaseBuffer:
    """One sequence's tokens between the server and the reader."""

    def __init__(self, lease_tokens: int) -> None:
        self.lease_tokens = lease_tokens
        self.passed_tokens = 0
        self._held: deque[BufferedChunk] = deque()
        self.held_bytes = 0
        self._taken_tokens = 0
        self._ahead_tokens = 0
        """Emitted by the server's count, with content still to come."""
        self._end: End | None = None

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def has_ended(self) -> bool:
        """Its end is known; pieces before it may still wait."""
        return self._end is not None

    def push(self, piece: BufferedChunk) -> None:
        if self._ahead_tokens:
            known = min(piece.tokens, self._ahead_tokens)
            piece.tokens -= known
            self._ahead_tokens -= known
        self._held.append(piece)
        self.held_bytes += piece.size
        self._taken_tokens += piece.tokens

    def emitted(self, tokens: int) -> None:
        """Counts `tokens` emitted in all from now on; their content comes later."""
        missing = tokens - self._taken_tokens
        if missing > 0:
            self._held.append(BufferedChunk(missing))
            self._taken_tokens += missing
            self._ahead_tokens += missing

    def end(self, end: End) -> None:
        """The server is done. Tokens that it counts beyond what was pushed are passed on before the end, so
        that they are covered as well; what was pushed beyond its count needs no lease."""
        if self._end is None:
            self.emitted(end.tokens)
            beyond = self._taken_tokens - end.tokens
            for piece in reversed(self._held):
                less = min(piece.tokens, max(0, beyond))
                piece.tokens -= less
                beyond -= less
            self._end = end

    def top_up(self, lease_tokens: int) -> None:
        """Sets the number of covered tokens, which never falls."""
        self.lease_tokens = max(self.lease_tokens, lease_tokens)

    def cut(self, finish: str, basis: str) -> None:
        """Ends the sequence here: what is held is dropped."""
        if self._end is not None and not self._held:
            return
        self._held.clear()
        self.held_bytes = 0
        self._end = End(finish, self.passed_tokens, basis)

    def take(self) -> list[BufferedChunk]:
        passed: list[BufferedChunk] = []
        while self._held:
            piece = self._held[0]
            room = self.lease_tokens - self.passed_tokens
            if piece.tokens > room:
                if room > 0:
                    piece.tokens -= room
                    self.passed_tokens += room
                    passed.append(BufferedChunk(room))
                break
            self._held.popleft()
            self.held_bytes -= piece.size
            self.passed_tokens += piece.tokens
            passed.append(piece)
        return passed

    def ended(self) -> End | None:
        """Its end, once all before it was taken; its count may be less if an estimate was too high."""
        return self._end if not self._held else None
