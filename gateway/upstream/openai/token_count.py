"""Counts the tokens that another server has emitted, and bounds its text by them.

On the way each chunk with content is at least one token, or what `continuous_usage_stats` says. With the
model's tokenizer the text itself is counted as it comes; else `LONGEST_TOKEN_BYTES` make a token. This never
exceeds the real number, so rates are not charged what settlement would not confirm. Text beyond the tokens
asked for does not fit (`fits`).

At the end the server's usage decides, unless the text holds more; without it the tokenizer (slow for long
texts), or an estimate by bytes with a margin. Each text is counted for itself in fixed segments, so chunking
and order do not change the result. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.messages import TokenLogprob
from gateway.upstream.answer_parts import AnswerPart
from gateway.upstream.openai.response import Chunk, Usage
from gateway.upstream.part_text import CallText

LONGEST_TOKEN_BYTES = 16
"""Few tokens are longer: without a tokenizer, n times this many bytes hold at least n of them."""
BYTES_PER_TOKEN = 3
"""Divisor of an estimate: about four bytes make a token of English, three of code or Chinese."""
SEGMENT_CHARACTERS = 512
BORDER_TOKENS = 2
"""Tokens that a cut at a segment's border may add."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MARGIN_TOKENS = 4
"""An eighth and this many more tokens in a text are no contradiction: it can be cut in several ways."""
BYTES_MARGIN_TOKENS = 32
"""The same without a tokenizer: a few tokens are longer than `LONGEST_TOKEN_BYTES`."""
CONTENT, FIRST_CALL = 1, 4
_RANKS = {"reasoning_content": 0, "reasoning": 0, "refusal": 2}
"""Places of an answer's texts in it; before the calls is a legacy `function_call`."""
MARK_TOKENS = 32
"""Estimate of the marks around tool calls and reasoning, where the server does not count them."""
OVERRUN_FACTOR = 2
OVERRUN_CHUNKS = 16


def estimated_tokens(num_bytes: int) -> int:
    """Rather too many than too few."""
    return -(-num_bytes // BYTES_PER_TOKEN)


class _Text:
    __slots__ = ("call", "pieces", "rest", "rest_tokens", "settled")

    def __init__(self) -> None:
        self.call = CallText()
        self.pieces: list[str] = []
        self.settled = 0
        self.rest = ""
        self.rest_tokens: int | None = 0
        """None: it was not counted since."""


class TokenCount:
    """The count of one sequence. `tokens` never falls, and never exceeds `most`: what was asked for."""

    def __init__(self, most: int, tokenize: Callable[[str], int] | None) -> None:
        self.most = most
        self._tokenize = tokenize
        self._most_chunks = OVERRUN_FACTOR * most + OVERRUN_CHUNKS
        self._most_text_tokens = self._with_margin(most)
        self._texts: dict[int, _Text] = {CONTENT: _Text()}
        """By rank, the order in which they are in a whole answer."""
        self._ranks: Sequence[int] = ()
        self._bytes = 0
        self._usage: Usage | None = None
        self._check_at_bytes = most + 1
        """With fewer bytes the text cannot hold more than `most` tokens: a byte makes at most one."""
        self._num_logprobs = 0
        self.chunks = 0
        self.tokens = 0
        self.text_tokens = 0
        self.fits: int | None = None
        """Characters of the last chunk's counted texts together that are within `most` tokens; None: all."""
        self.lengths: Sequence[int] = ()
        """Of these texts: of the parts before the text, the text, and the parts after it."""
        self.has_parts = False
        """It has more than text: its model wrote marks around that, which nobody here can count."""
        self.uncounted = 0
        self._said_bytes = 0
        """Of the text and all parts as they were sent, however they were cut into chunks."""

    def saw(self, chunk: Chunk) -> int:
        """Takes a chunk; returns its number of tokens, as far as is known now. Sets `fits` and `lengths`."""
        fragments = 0
        has_parts = bool(chunk.before or chunk.after)
        if has_parts:
            texts, fragments = self._counted_texts(chunk)
            text = "".join(texts)
            self.has_parts = self.has_parts or fragments > 0
        else:
            text, texts = chunk.text, [chunk.text]
            self._ranks = (CONTENT,)
        size = len(text) if text.isascii() else len(text.encode())
        if not has_parts:
            self._said_bytes += size
        before = self.tokens
        self.fits = None
        if size or chunk.logprobs or fragments:  # a token may have no text yet: the rest is to come
            self.chunks += fragments or 1
            least = 1
            if self._tokenize is None:
                self._bytes += size
                least = size // LONGEST_TOKEN_BYTES
                self.fits = self._measure(text)
            else:
                self._count(texts, size)
            self.tokens += max(least, len(chunk.logprobs)) or 1
        if chunk.usage is not None:
            self._usage = chunk.usage
            self.tokens = max(self.tokens, chunk.usage.completion_tokens)
        self.tokens = min(self.most, max(before, self.tokens, self.text_tokens))
        return self.tokens - before

    def _counted_texts(self, chunk: Chunk) -> tuple[list[str], int]:
        """The texts of a chunk that has parts, and how many of its parts the model made."""
        parts = (*chunk.before, None, *chunk.after)
        self._ranks = [CONTENT if part is None else _rank(part) for part in parts]
        texts, fragments = [], 0
        for part, rank in zip(parts, self._ranks, strict=True):
            if part is None:
                texts.append(chunk.text)
                self._said_bytes += len(chunk.text.encode())
                continue
            text = self._texts.setdefault(rank, _Text())
            texts.append(part.text if part.is_plain else text.call.words(part.text))
            self._said_bytes += len(part.text.encode())
            fragments += part.is_generated
            self.uncounted += part.uncounted
        self.lengths = [len(text) for text in texts]
        return texts, fragments

    def fitting(self, logprobs: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
        """Of the last chunk's log probabilities those of the first `most` tokens."""
        room = self.most - self._num_logprobs
        self._num_logprobs += len(logprobs)
        return logprobs if len(logprobs) <= room else logprobs[: max(0, room)]

    @property
    def usage(self) -> Usage | None:
        return self._usage

    @property
    def bytes_to_tokenize(self) -> int:
        """Size of the text that `final` has to tokenise; 0: none."""
        if self._tokenize is None:
            return 0
        self._count_to_the_end()
        return 0 if self._is_usage_believed or self.is_overrun else self._bytes

    def final(self) -> tuple[int, str]:
        """All tokens after a proper end, never more than asked for, and the count's source."""
        if self._tokenize is not None:
            self._count_to_the_end()
        if self._usage is not None and self._is_usage_believed:
            return min(self.most, self._usage.completion_tokens), "upstream"
        if self.is_overrun:
            return self.most, "estimate" if self._tokenize is None else "tokenizer"
        if self.has_parts and self._usage is None:
            estimated = estimated_tokens(self._said_bytes) + MARK_TOKENS
            return min(self.most, estimated), "estimate"
        if self._tokenize is not None:
            texts = ["".join(text.pieces) for _, text in sorted(self._texts.items())]
            return min(self.most, max(1, self._tokenize("".join(texts)))), "tokenizer"
        return min(self.most, max(1, estimated_tokens(self._bytes))), "estimate"

    @property
    def _is_usage_believed(self) -> bool:
        """Whether the server has said its count, and the text holds no more tokens than that."""
        said = self._usage
        is_said = said is not None and (said.completion_tokens > 0 or not self.chunks)
        return said is not None and is_said and not self._is_above(said.completion_tokens)

    @property
    def is_overrun(self) -> bool:
        """The server exceeds what was asked by more than chunking and other tokenisations explain."""
        return self.chunks > self._most_chunks or self.text_tokens > self._most_text_tokens

    @property
    def contradiction(self) -> str:
        """How the answer contradicts itself; empty: it does not. `overrun`: it did not stop. `usage_low`: the
        text holds more than its usage; `usage_high`: the usage exceeds what was asked for."""
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
        return self.text_tokens > self._with_margin(tokens)

    def _with_margin(self, tokens: int) -> int:
        margin = BYTES_MARGIN_TOKENS if self._tokenize is None else MARGIN_TOKENS
        return tokens + tokens // 8 + margin

    def _measure(self, text: str) -> int | None:
        """Without a tokenizer: by bytes. Returns how many characters fit; None: all."""
        self.text_tokens = self._bytes // LONGEST_TOKEN_BYTES
        beyond = self._bytes - self.most * LONGEST_TOKEN_BYTES
        if beyond <= 0:
            return None
        data = text.encode()
        return len(data[: max(0, len(data) - beyond)].decode(errors="ignore"))

    def _count(self, texts: Sequence[str], size: int) -> None:
        """With a tokenizer, in segments, and when the texts may exceed `most`. Sets `fits`."""
        self._bytes += size
        if self.text_tokens > self.most:
            self.fits = 0
        start = 0
        for rank, said in zip(self._ranks, texts, strict=True):
            text = self._texts[rank]
            text.pieces.append(said)
            if self.fits is not None and self.is_overrun:
                return
            if (
                self.fits is None
                and len(text.rest) + len(said) < SEGMENT_CHARACTERS
                and self._bytes < self._check_at_bytes
            ):
                text.rest, text.rest_tokens = text.rest + said, None
            else:
                self._count_segments(text, said, start)
            start += len(said)

    def _count_segments(self, text: _Text, said: str, start: int) -> None:
        """Counts what is `said` to the end of a text; it begins at `start` of the chunk."""
        others = self._others(text)
        at = 0
        while at < len(said):
            before, part = text.rest, said[at : at + SEGMENT_CHARACTERS - len(text.rest)]
            text.rest += part
            tokens = text.rest_tokens = self._tokens_of(text.rest)
            self.text_tokens = max(self.text_tokens, others + text.settled + tokens)
            if self.text_tokens > self.most:
                if self.fits is None:
                    self.fits = start + at + self._fitting(others + text.settled, before, part)
                if self.is_overrun:
                    return
            if len(text.rest) == SEGMENT_CHARACTERS:
                text.settled += max(0, tokens - BORDER_TOKENS)
                text.rest, text.rest_tokens = "", 0
            at += len(part)
        self._check_at_bytes = self._bytes + max(0, self.most - self.text_tokens) + 1

    def _others(self, text: _Text | None = None) -> int:
        found = 0
        for other in self._texts.values():
            if other is not text:
                if other.rest_tokens is None:
                    other.rest_tokens = self._tokens_of(other.rest)
                found += other.settled + other.rest_tokens
        return found

    def _count_to_the_end(self) -> None:
        """Anew: on the way a text may have seemed longer, as its next letters make one token of several."""
        if not self.is_overrun:
            self.text_tokens = self._others()

    def _fitting(self, settled: int, before: str, part: str) -> int:
        """The most characters of `part` that fit after `before`, a text's end after `settled` tokens."""
        fits, over = 0, len(part)
        while over - fits > 1:
            middle = (fits + over) // 2
            if settled + self._tokens_of(before + part[:middle]) <= self.most:
                fits = middle
            else:
                over = middle
        return fits

    def _tokens_of(self, text: str) -> int:
        """Undecodable bytes become replacement characters, several of which may be one token."""
        assert self._tokenize is not None
        bad = text.count(REPLACEMENT)
        if not bad:
            return self._tokenize(text)
        return self._tokenize(text.replace(REPLACEMENT, "")) + bad // LONGEST_TOKEN_BYTES


def _rank(part: AnswerPart) -> int:
    name = next(iter(part.value))
    if name == "tool_calls":
        return FIRST_CALL + int(part.value[name][0]["index"])
    return _RANKS.get(name, FIRST_CALL - 1)
