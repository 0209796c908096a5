"""Incremental detokenizer with stop strings. Needs `tokenizers` only.

Never half a character, and together exactly what the tokenizer would decode in one go. Stop strings may span
tokens; text that may begin one is held back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tokenizers import Tokenizer

from engine.messages import SamplingParams

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Decoders' output for bytes that are not (or not yet) a character."""
CONTEXT_TOKENS = 8
"""Prompt tokens decoded before the first output token."""
PENDING_TOKENS = 8
"""If more tokens than this wait for a whole character, the older ones will never form one."""
CHARACTER_BYTES = 4
"""Longest UTF-8 sequence; a token holds at least one byte."""
MAX_TOKEN_TEXTS = 65_536
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class NoTokenizer(Exception):
    """The model directory has no tokenizer that can be read; the message says which file is at fault."""


def load_texts(model_dir: Path) -> DetokenizerFactory:
    """Reads `tokenizer.json` of a model directory. Raises `NoTokenizer`."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise NoTokenizer(f"{model_dir} has no tokenizer.json; save the model's fast tokenizer beside it")
    try:
        return DetokenizerFactory(Tokenizer.from_file(str(path)))
    except Exception as error:  # the Rust side raises bare Exception
        raise NoTokenizer(f"{path} cannot be read: {error}") from None


class DetokenizerFactory:
    """Makes one `IncrementalText` for each sequence. Implements the engine core's factory protocol."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._token_texts: dict[int, str] = {}
        self._anchor_ids = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text = tokenizer.decode(self._anchor_ids)

    def special_tokens(self, is_wanted: Callable[[str], bool]) -> dict[int, str]:
        tokens = self._tokenizer.get_added_tokens_decoder()
        return {each: tokens[each].content for each in self._special_ids if is_wanted(tokens[each].content)}

    def open(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        marks: Mapping[int, str] = MappingProxyType({}),
    ) -> IncrementalText:
        """Text of the tokens after `prompt_token_ids`. The last of these count as its neighbours, so that a
        completion keeps its leading space; after a special token a text begins afresh. `marks`: texts of
        the special tokens that are shown."""
        context: list[int] = []
        for token_id in reversed(prompt_token_ids[-CONTEXT_TOKENS:]):
            if self.is_skipped(token_id):
                break
            context.insert(0, token_id)
        return IncrementalText(self, context, sampling.stop, marks)

    def is_skipped(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def decode(self, token_ids: list[int]) -> str:
        """The tokens' text, without special tokens; ids that the tokenizer does not have are skipped."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        """One token's own text, special tokens included (for log probabilities)."""
        text = self._token_texts.get(token_id)
        if text is None:
            together: str = self._tokenizer.decode([*self._anchor_ids, token_id], skip_special_tokens=False)
            if together.startswith(self._anchor_text):
                text = together[len(self._anchor_text) :]
            else:
                text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            if len(self._token_texts) < MAX_TOKEN_TEXTS:
                self._token_texts[token_id] = text
        return text


class IncrementalText:
    """Text of one sequence, the core's `Text`: what `push` and `flush` return adds up to the answer."""

    def __init__(
        self, factory: DetokenizerFactory, context: list[int], stop: Sequence[str], marks: Mapping[int, str]
    ) -> None:
        self._factory = factory
        self._detokenizer = Detokenizer(factory, context, marks)
        self._stops = StopStrings(stop)

    @property
    def stopped(self) -> str:
        return self._stops.found

    def push(self, token_id: int) -> str:
        return "" if self.stopped else self._stops.push(self._detokenizer.push(token_id))

    def flush(self) -> str:
        if self.stopped:
            return ""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()

    def logprob_text(self, token_id: int) -> str:
        return self._factory.token_text(token_id)


class Detokenizer:
    """Tokens to text, one at a time, as the tokenizer would decode them together.

    A window of the newest tokens is decoded each time. It begins with tokens whose text is out, because many
    decoders look at a token's neighbours. Text that ends in a replacement character waits. One deviation:
    where a run of byte tokens turns out not to be UTF-8, some tokenizers take back the whole run; characters
    of it that are out already stay.
    """

    def __init__(self, factory: DetokenizerFactory, context: list[int], marks: Mapping[int, str]) -> None:
        self._factory = factory
        self._marks = marks
        self._window = list(context)
        self._neighbours = len(context)
        """Number of leading window tokens whose text is already out."""
        self._shown = factory.decode(self._window)

    def push(self, token_id: int) -> str:
        if token_id in self._marks:
            return self.flush() + self._marks[token_id]
        if self._factory.is_skipped(token_id):
            return ""
        self._window.append(token_id)
        text = self._factory.decode(self._window)
        waiting = len(self._window) - self._neighbours
        if not text.startswith(self._shown):
            if text.endswith(REPLACEMENT) and waiting <= PENDING_TOKENS:
                return ""
            text = self._restart()
        settled = max(len(self._shown), len(text.rstrip(REPLACEMENT)))
        fresh = text[len(self._shown) : settled]
        self._shown = text[:settled]
        if settled < len(text):
            return fresh if waiting <= PENDING_TOKENS else fresh + self._settle(text)
        if fresh or waiting > PENDING_TOKENS:
            self._slide(len(self._window))
        return fresh

    def flush(self) -> str:
        """Ends the text: bytes that wait for the rest of their character become replacement characters."""
        text = self._factory.decode(self._window)
        if not text.startswith(self._shown):
            text = self._restart()
        fresh = text[len(self._shown) :]
        self._slide(len(self._window))
        return fresh

    def _restart(self) -> str:
        """Drops the neighbours: the window's text no longer begins with what is out."""
        del self._window[: self._neighbours]
        self._neighbours = 0
        self._shown = ""
        return self._factory.decode(self._window)

    def _settle(self, text: str) -> str:
        """Releases older tokens whose bytes are no characters. Keeps what may still become one."""
        for end in range(len(self._window) - CHARACTER_BYTES, self._neighbours, -1):
            head = self._factory.decode(self._window[:end])
            if text.startswith(head) and len(head) >= len(self._shown):
                fresh = head[len(self._shown) :]
                self._slide(end)
                return fresh
        if len(self._window) - self._neighbours <= 2 * PENDING_TOKENS:
            return ""
        fresh = text[len(self._shown) :]
        self._slide(len(self._window))
        return fresh

    def _slide(self, end: int) -> None:
        """Moves the window: its first `end` tokens are out, and the newest of them become the neighbours."""
        del self._window[: self._neighbours]
        self._neighbours = end - self._neighbours
        self._shown = self._factory.decode(self._window[: self._neighbours])


class StopStrings:
    """Passes text on until a stop string is complete; drops it and all that follows. The first one completed
    wins, of several completed at once the longest: characters decide, not tokens."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [text for text in stop if text]
        self._held = ""
        self.found = ""
        """The one that was completed; empty: none yet."""

    def push(self, text: str) -> str:
        if self.found or not text:
            return ""
        if not self._stop:
            return text
        self._held += text
        hits = [(start + len(stop), start) for stop in self._stop if (start := self._held.find(stop)) >= 0]
        if hits:
            end, start = min(hits)
            self.found = self._held[start:end]
            return self._release(start)
        return self._release(len(self._held) - self._undecided())

    def flush(self) -> str:
        """Ends the text: the held beginning of a stop string was none."""
        return "" if self.found else self._release(len(self._held))

    def _undecided(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop string."""
        return max(
            size
            for stop in self._stop
            for size in range(min(len(stop), len(self._held) + 1))
            if self._held.endswith(stop[:size])
        )

    def _release(self, length: int) -> str:
        shown, self._held = self._held[:length], "" if self.found else self._held[length:]
        return shown
