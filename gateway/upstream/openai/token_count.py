"""Counts the tokens that another server has emitted, and bounds its text by them.

While it runs, its chunks are counted (a whole answer is one of them): a chunk with content is at least one
token, or what the server says with `continuous_usage_stats`. Where the model's tokenizer is known, the text
itself is counted as it comes; elsewhere `LONGEST_TOKEN_BYTES` make at least a token. That is never more than
there really were, so that nothing is charged to a rate which the settlement would not confirm. Text beyond
the tokens that were asked for does not fit (`fits`), whatever the server says of it.

At the end the server's usage decides, unless the text holds more tokens than that; without it the text is
counted by the model's tokenizer, which takes long for a long text; without that it is estimated by bytes,
with a margin. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.messages import TokenLogprob
from gateway.upstream.openai.response import Chunk, Usage
from gateway.upstream.part_text import CallText

LONGEST_TOKEN_BYTES = 16
"""Few tokens are longer: without a tokenizer, n times this many bytes hold at least n of them."""
BYTES_PER_TOKEN = 3
"""Divisor of an estimate: about four bytes make a token of English, three of code or Chinese."""
SEGMENT_CHARACTERS = 512
"""Text is counted in segments, each once."""
BORDER_TOKENS = 2
"""A token that a segment's border cuts may count as this many more."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MARGIN_TOKENS = 4
"""An eighth and this many more tokens in a text are no contradiction: it can be cut in several ways."""
BYTES_MARGIN_TOKENS = 32
"""The same without a tokenizer: a few tokens are longer than `LONGEST_TOKEN_BYTES`."""
MARK_TOKENS = 32
"""Estimate of the marks around tool calls and reasoning, where the server does not count them."""
OVERRUN_FACTOR = 2
OVERRUN_CHUNKS = 16


def estimated_tokens(num_bytes: int) -> int:
    """Estimated tokens of a text's bytes, rather too many than too few."""
    return -(-num_bytes // BYTES_PER_TOKEN)


class TokenCount:
    """The count of one sequence. `tokens` never falls, and never exceeds `most`: what was asked for."""

    def __init__(self, most: int, tokenize: Callable[[str], int] | None) -> None:
        """`tokenize` says how many tokens a text is; None: no tokenizer is known."""
        self.most = most
        """Tokens that were asked for."""
        self._tokenize = tokenize
        self._text: list[str] = []
        self._bytes = 0
        self._usage: Usage | None = None
        self._settled = 0
        """Tokens of the text before `_rest`."""
        self._rest = ""
        self._check_at_bytes = most + 1
        """With fewer bytes the text cannot hold more than `most` tokens: a byte makes at most one."""
        self._num_logprobs = 0
        self.chunks = 0
        """Chunks with content."""
        self.tokens = 0
        """Emitted so far."""
        self.text_tokens = 0
        """Tokens that the text holds at least. Not capped."""
        self.fits: int | None = None
        """Characters of the last chunk's counted texts, one after the other, within `most` tokens; None: all
        of them."""
        self.lengths: Sequence[int] = ()
        """Of these texts: of the parts before the text, the text, and the parts after it."""
        self.has_parts = False
        """It has said more than text: its model wrote marks around that, which nobody here can count."""
        self.uncounted = 0
        """Characters of parts that count for no tokens."""
        self._call_text = CallText()
        self._said_bytes = 0
        """Of the text and all parts as they were sent, however they were cut into chunks."""

    def saw(self, chunk: Chunk) -> int:
        """Takes a chunk; returns its number of tokens, as far as is known now. Sets `fits` and `lengths`."""
        fragments = 0
        text = chunk.text
        if chunk.before or chunk.after:
            text, fragments = self._counted_text(chunk)
            self.has_parts = self.has_parts or fragments > 0
        size = len(text) if text.isascii() else len(text.encode())
        if not chunk.before and not chunk.after:
            self._said_bytes += size
        before = self.tokens
        self.fits = None
        if size or chunk.logprobs or fragments:  # a token may have no text yet: the rest is to come
            self.chunks += max(1, fragments)
            least = 1
            if self._tokenize is None:
                self._bytes += size
                least = size // LONGEST_TOKEN_BYTES
                self.fits = self._measure(text)
            else:
                self._text.append(text)
                self.fits = self._count(text, size)
            self.tokens += max(1, least, len(chunk.logprobs))
        if chunk.usage is not None:
            self._usage = chunk.usage
            self.tokens = max(self.tokens, chunk.usage.completion_tokens)
        self.tokens = min(self.most, max(before, self.tokens, self.text_tokens))
        return self.tokens - before

    def _counted_text(self, chunk: Chunk) -> tuple[str, int]:
        """The texts of a chunk that has parts, one after the other, and how many of its parts the model
        made."""
        texts, fragments = [], 0
        for part in (*chunk.before, None, *chunk.after):
            if part is None:
                texts.append(chunk.text)
                self._said_bytes += len(chunk.text.encode())
                continue
            texts.append(part.text if part.is_plain else self._call_text.words(part.text))
            self._said_bytes += len(part.text.encode())
            fragments += part.is_generated
            self.uncounted += part.uncounted
        self.lengths = [len(each) for each in texts]
        return "".join(texts), fragments

    def fitting(self, logprobs: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
        """Of the last chunk's log probabilities those of the first `most` tokens."""
        room = self.most - self._num_logprobs
        self._num_logprobs += len(logprobs)
        return logprobs if len(logprobs) <= room else logprobs[: max(0, room)]

    @property
    def usage(self) -> Usage | None:
        """The server's own latest count."""
        return self._usage

    @property
    def bytes_to_tokenize(self) -> int:
        """Size of the text that `final` has to tokenise; 0: none."""
        if self._tokenize is None:
            return 0
        self._count_rest()
        return 0 if self._is_usage_believed or self.is_overrun else self._bytes

    def final(self) -> tuple[int, str]:
        """Tokens in all when the stream has ended properly, never more than were asked for, and the count's
        source."""
        if self._tokenize is not None:
            self._count_rest()
        if self._usage is not None and self._is_usage_believed:
            return min(self.most, self._usage.completion_tokens), "upstream"
        if self.is_overrun:
            return self.most, "estimate" if self._tokenize is None else "tokenizer"
        if self.has_parts and self._usage is None:
            estimated = estimated_tokens(self._said_bytes) + MARK_TOKENS
            return min(self.most, estimated), "estimate"
        if self._tokenize is not None:
            return min(self.most, max(1, self._tokenize("".join(self._text)))), "tokenizer"
        return min(self.most, max(1, estimated_tokens(self._bytes))), "estimate"

    @property
    def _is_usage_believed(self) -> bool:
        """Whether the server has said its count, and the text holds no more tokens than that."""
        said = self._usage
        is_said = said is not None and (said.completion_tokens > 0 or not self.chunks)
        return said is not None and is_said and not self._is_above(said.completion_tokens)

    @property
    def is_overrun(self) -> bool:
        """The server goes on beyond what it was asked for: a chunk may be less than a token, and a text may
        be cut into tokens in other ways than its tokenizer does, but not by that much."""
        return self.chunks > OVERRUN_FACTOR * self.most + OVERRUN_CHUNKS or self._is_above(self.most)

    @property
    def contradiction(self) -> str:
        """How the server's answer contradicts what it was asked for or what it says; empty: it does not.
        `overrun`: it did not stop. `usage_low`: the text holds more tokens than its usage. `usage_high`: its
        usage is more than it was asked for."""
        if self.is_overrun:
            return "overrun"
        if self._usage is None:
            return ""
        if self._usage.completion_tokens and self._is_above(self._usage.completion_tokens):
            return "usage_low"
        return "usage_high" if self._usage.completion_tokens > self.most else ""

    # ------------------------------------------------------------ the tokens of the text

    def _is_above(self, tokens: int) -> bool:
        """The text holds more than `tokens`, by more than honest servers' counts differ from ours."""
        margin = BYTES_MARGIN_TOKENS if self._tokenize is None else MARGIN_TOKENS
        return self.text_tokens > tokens + tokens // 8 + margin

    def _measure(self, text: str) -> int | None:
        """Without a tokenizer: by bytes. Returns how many characters fit; None: all."""
        self.text_tokens = self._bytes // LONGEST_TOKEN_BYTES
        beyond = self._bytes - self.most * LONGEST_TOKEN_BYTES
        if beyond <= 0:
            return None
        data = text.encode()
        return len(data[: max(0, len(data) - beyond)].decode(errors="ignore"))

    def _count(self, text: str, size: int) -> int | None:
        """With a tokenizer: in segments, and whenever the text may hold more than was asked for. Returns how
        many characters fit; None: all."""
        self._bytes += size
        if self.text_tokens > self.most:
            if self.is_overrun:
                return 0
            fits: int | None = 0
        elif len(self._rest) + len(text) < SEGMENT_CHARACTERS and self._bytes < self._check_at_bytes:
            self._rest += text
            return None
        else:
            fits = None
        for start in range(0, len(text), SEGMENT_CHARACTERS):
            part = text[start : start + SEGMENT_CHARACTERS]
            before, self._rest = self._rest, self._rest + part
            self._count_rest()
            if self.text_tokens > self.most:
                if fits is None:
                    fits = start + self._fitting(before, part)
                if self.is_overrun:
                    return fits
            if len(self._rest) >= SEGMENT_CHARACTERS:
                self._settled, self._rest = max(0, self.text_tokens - BORDER_TOKENS), ""
        self._check_at_bytes = self._bytes + max(0, self.most - self.text_tokens) + 1
        return fits

    def _count_rest(self) -> None:
        self.text_tokens = max(self.text_tokens, self._settled + self._tokens_of(self._rest))

    def _fitting(self, before: str, part: str) -> int:
        """The most characters of `part` with which the text, `before` at its end, has `most` tokens."""
        fits, over = 0, len(part)
        while over - fits > 1:
            middle = (fits + over) // 2
            if self._settled + self._tokens_of(before + part[:middle]) <= self.most:
                fits = middle
            else:
                over = middle
        return fits

    def _tokens_of(self, text: str) -> int:
        """Bytes that are no text come as a replacement character each, and several may be one token."""
        assert self._tokenize is not None
        bad = text.count(REPLACEMENT)
        if not bad:
            return self._tokenize(text)
        return self._tokenize(text.replace(REPLACEMENT, "")) + bad // LONGEST_TOKEN_BYTES
