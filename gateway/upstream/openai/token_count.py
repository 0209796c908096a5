"""Counts the tokens that another server has emitted.

While it runs, its chunks are counted (a whole answer is one of them): a chunk with content is at least one
token, or what the server says with `continuous_usage_stats`. That is never more than there really were, so
that nothing is charged to a rate which the settlement would not confirm. At the end the server's usage
decides; without it the text is counted by the model's tokenizer; without that it is estimated by bytes, with
a margin. Pure.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.upstream.openai.response import Chunk, Usage

LONGEST_TOKEN_BYTES = 16
"""Few tokens are longer: a chunk of n times this many bytes holds at least n of them."""
BYTES_PER_TOKEN = 3
"""Divisor of an estimate: about four bytes make a token of English, three of code or Chinese."""


OVERRUN_FACTOR = 2
OVERRUN_CHUNKS = 16


def estimated_tokens(num_bytes: int) -> int:
    """Estimated tokens of a text's bytes, rather too many than too few."""
    return -(-num_bytes // BYTES_PER_TOKEN)


class TokenCount:
    """The count of one sequence. It never falls, and never exceeds `most`, which the server was given."""

    def __init__(self, most: int, tokenize: Callable[[str], int] | None) -> None:
        """`tokenize` says how many tokens a text is; None: no tokenizer is known."""
        self._most = most
        self._tokenize = tokenize
        self._text: list[str] = []
        self._bytes = 0
        self._usage: Usage | None = None
        self.chunks = 0
        """Chunks with content."""
        self.tokens = 0
        """Emitted so far."""

    def saw(self, chunk: Chunk) -> int:
        """Takes a chunk; returns its number of tokens, as far as is known now."""
        text = chunk.text
        size = (len(text) if text.isascii() else len(text.encode())) + chunk.hidden_bytes
        before = self.tokens
        if size or chunk.logprobs:  # a token may have no text yet: the rest of its character is to come
            self.chunks += 1
            self._bytes += size
            if self._tokenize is not None:
                self._text.append(text)
            self.tokens += max(1, size // LONGEST_TOKEN_BYTES, len(chunk.logprobs))
        if chunk.usage is not None:
            self._usage = chunk.usage
            self.tokens = max(self.tokens, chunk.usage.completion_tokens)
        self.tokens = min(self._most, max(before, self.tokens))
        return self.tokens - before

    @property
    def usage(self) -> Usage | None:
        """The server's own latest count."""
        return self._usage

    def final(self) -> tuple[int, str]:
        """Tokens in all when the stream has ended properly, never more than were asked for, and the count's
        source."""
        if self._usage is not None and (self._usage.completion_tokens or not self.chunks):
            return min(self._most, self._usage.completion_tokens), "upstream"
        if self._tokenize is not None:
            return min(self._most, max(1, self._tokenize("".join(self._text)))), "tokenizer"
        return min(self._most, max(1, estimated_tokens(self._bytes))), "estimate"

    @property
    def is_overrun(self) -> bool:
        """The server goes on far beyond what it was asked for: a chunk may be less than a token, but not by
        that much."""
        return self.chunks > OVERRUN_FACTOR * self._most + OVERRUN_CHUNKS
