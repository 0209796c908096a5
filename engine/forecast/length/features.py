"""Features of a request that say how long its answer will be.

What can be read off before it runs, hashed (CRC-32: the same in every process) into a fixed number of places:
lengths, turns, words of the task, its numbers and quotations, some of them once more for each leading word.
Only the two ends of the last message are looked at. Pure.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from math import log1p
from zlib import crc32

import msgspec

PLACES = 4096
"""Of hashed features; two that share a place share a weight."""
HEAD_CHARACTERS = 96
TAIL_CHARACTERS = 160
"""Of the last message, whose ends are where instructions stand."""
MAX_WORDS = 12
MAX_NUMBERS = 4
LARGEST_NUMBER = 100_000
"""A larger number is a year of some calendar or an identifier, no length."""

_PIECES = re.compile(r"[^\W\d_]+|\d+")
"""Words and numbers. As here, `isdecimal` and not `isdigit` says which: "²" is a digit, and no number."""
_QUOTED = re.compile(r"[\"“](.+)[\"”]", re.DOTALL)


@lru_cache(maxsize=16_384)
def place_of(name: str) -> int:
    """Where the feature of this name has its weights."""
    return crc32(name.encode("utf-8", "replace")) % PLACES


_BIAS, _PROMPT, _TEXT, _TURNS, _LIMIT, _HAS_LIMIT, _STOP, _GREEDY, _HOT = (
    place_of(name)
    for name in ("bias", "prompt", "text", "turns", "limit", "limited", "stop", "greedy", "hot")
)


class Features(msgspec.Struct, frozen=True):
    """A request's places and their values, one for each; values are of the order of 1. And where it comes
    from, as hashes."""

    places: tuple[int, ...]
    values: tuple[float, ...]
    user: int = 0
    """Of the end user that the client named; 0: none."""
    blocks: tuple[int, ...] = ()
    """Chain of the prompt's leading blocks: those of a conversation's next turn begin with them."""


def features_of(
    text: str,
    *,
    prompt_tokens: int,
    max_tokens: int | None = None,
    turns: int = 1,
    temperature: float = 1.0,
    has_stop: bool = False,
    user: str = "",
    blocks: tuple[int, ...] = (),
) -> Features:
    """The features of a request. `text`: what was last asked; `max_tokens`: None where no length was named;
    `turns`: messages of the conversation, this one included; `user`: the end user's name, which is not kept;
    `blocks`: hashes of the prompt's leading blocks."""
    found: dict[int, float] = {
        _BIAS: 1.0,
        _PROMPT: log1p(prompt_tokens) / 4,
        _TEXT: log1p(len(text)) / 4,
        _TURNS: log1p(turns),
    }
    if max_tokens is not None:
        found[_HAS_LIMIT] = 1.0
        found[_LIMIT] = log1p(max_tokens) / 4
    if has_stop:
        found[_STOP] = 1.0
    if temperature < 0.1:
        found[_GREEDY] = 1.0
    elif temperature > 1.0:
        found[_HOT] = 1.0
    if text:
        _add_wording(text, found)
    named = int.from_bytes(blake2b(user.encode("utf-8", "replace"), digest_size=8).digest()) if user else 0
    return Features(tuple(found), tuple(found.values()), named, blocks)


def _add_wording(text: str, found: dict[int, float]) -> None:
    if len(text) > HEAD_CHARACTERS + TAIL_CHARACTERS:
        ends = f"{text[:HEAD_CHARACTERS]} {text[-TAIL_CHARACTERS:]}"
        task = text[-TAIL_CHARACTERS:].rpartition("\n")[2]
    else:
        ends = text
        task = text.rstrip().rpartition("\n")[2]
    quoted = _QUOTED.search(task)
    pieces = _PIECES.findall(task.lower() if quoted is None else task.replace(quoted[1], " ").lower())
    words = [piece for piece in pieces if not piece[0].isdecimal()]
    has_numbers = len(words) < len(pieces)
    lead = words[0] if words else ""
    # What the instruction measures itself by, for all tasks together and for each leading word.
    sizes = {"lead": 1.0, "task": log1p(len(task)) / 4}
    if quoted is not None:
        sizes["quoted"] = log1p(len(quoted[1])) / 2
    commas = task.count(",")
    if commas:
        sizes["items"] = log1p(commas)
    for name, value in sizes.items():
        found[place_of(name)] = value
        found[place_of(f"{name} after {lead}")] = value
    if has_numbers:
        _add_numbers(pieces, found)
    for word in words[-MAX_WORDS:]:
        found[place_of(f"word {word}")] = 0.5
    for left, right in pairwise(words[:4]):
        found[place_of(f"pair {left} {right}")] = 0.5
    if task is not ends:
        for word in _PIECES.findall(ends.lower())[:2]:
            found[place_of(f"opens {word}")] = 0.5


def _add_numbers(pieces: list[str], found: dict[int, float]) -> None:
    """Numbers, by the words around them ("12 months", "to 57"), and how far the first two are apart."""
    numbers: list[tuple[str, int]] = []
    for index, piece in enumerate(pieces):
        if piece[0].isdecimal():
            before = pieces[index - 1] if index else ""
            after = pieces[index + 1] if index + 1 < len(pieces) else ""
            number = min(int(piece[:7]), LARGEST_NUMBER)
            value = log1p(number) / 2
            found[place_of(f"{before} number")] = value
            found[place_of(f"number {after}")] = value
            numbers.append((before, number))
            if len(numbers) == MAX_NUMBERS:
                break
    if len(numbers) > 1:
        (before_first, first), (before_second, second) = numbers[:2]
        value = log1p(abs(second - first)) / 2
        found[place_of("range")] = value
        found[place_of(f"range {before_first} {before_second}")] = value
