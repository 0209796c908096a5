"""Finds the tokens that end an answer from where it stands, so that it is valid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llguidance import LLMatcher, LLTokenizer

#: In a string: end it, or make it longer.
_IN_STRING = (b'"', b" ")
#: Elsewhere: end what is open, or write the least value. Nines end any number that has bounds.
_ELSEWHERE = (
    *(b"}", b"]", b",", b"null", b'"', b"0}", b"0]", b"0,"),
    *(b"%d" % digit for digit in range(9, -1, -1)),
    *(b"[", b"{"),
)
_SPECIAL = b"\xff"
#: A grammar's `end_words` as tokens: names, as a whole and without their quote, and what ends free text.
EndWords = tuple[list[list[int]], list[list[int]]]


class Closer:
    """Of one tokenizer."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        every = tuple(bytes([value]) for value in range(256))
        self._in_string = [self._tokens(one) for one in (*_IN_STRING, *_ELSEWHERE, *every)]
        self._elsewhere = [self._tokens(one) for one in (*_ELSEWHERE, *every)]
        self._space, self._new_line = self._tokens(b" "), self._tokens(b"\n")

    def words(self, texts: Sequence[str]) -> EndWords:
        """A grammar's `end_words`: names, as a whole and without their quote, and what ends free text."""
        names = [text.encode() for text in texts if text.startswith('"')]
        free = [text for text in texts if not text.startswith('"')]
        return (
            [self._tokens(name) for name in names] + [self._tokens(name[1:]) for name in names],
            [self._tokenizer.tokenize_str(text, parse_special=True) for text in free]
            + [self._tokenizer.tokenize_str(text) for text in free],
        )

    def closing(self, matcher: LLMatcher, words: EndWords, most: int) -> list[int] | None:
        """None: none of at most `most` tokens was found. The matcher stays as it is."""
        walk = matcher.deep_copy()
        found: list[int] = []
        while not walk.is_accepting():
            step = self._forced(walk, words[0]) or next(self._choices(walk, *words), [])
            if not step or len(found) + len(step) > most or not walk.consume_tokens(step):
                return None
            found += step
        return None if walk.is_error() else found

    def _forced(self, walk: LLMatcher, names: list[list[int]]) -> list[int]:
        forced = walk.compute_ff_bytes()
        if _SPECIAL in forced:
            return walk.compute_ff_tokens()
        if names and forced:
            # Where a name may begin, which one is a choice, even if all begin alike.
            if name := next((name for name in names if _fits(walk, name)), None):
                return name
            if (quote := forced.find(b'"', 1)) > 0:
                forced = forced[: quote + forced.startswith(b'"')]
        return self._tokens(forced) if forced else []

    def _choices(self, walk: LLMatcher, names: list[list[int]], free: list[list[int]]) -> Iterator[list[int]]:
        is_free = _fits(walk, self._new_line)
        yield from (word for word in (free if is_free else names) if _fits(walk, word))
        rest = self._in_string if _fits(walk, self._space) else self._elsewhere
        yield from (step for step in rest if _fits(walk, step))

    def _tokens(self, text: bytes) -> list[int]:
        return self._tokenizer.tokenize_bytes(text)


def _fits(walk: LLMatcher, tokens: list[int]) -> bool:
    return bool(tokens) and walk.validate_tokens(tokens) == len(tokens)
