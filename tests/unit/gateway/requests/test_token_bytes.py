"""A text never has fewer tokens than its bytes and the longest token say."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from gateway.requests.token_bytes import COMPOSED_BYTES, longest_token_bytes
from tests.models.tokenizers import byte_fallback, byte_level, metaspace, word_piece, word_suffix


def composed() -> Tokenizer:
    """As Qwen's: composes, then splits, then bytes. Here each byte is a token."""
    letters = {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


BOUNDED = {"byte-level": byte_level(), "byte-fallback": byte_fallback(), "composed": composed()}
TEXTS = (
    st.text()
    | st.text(alphabet=" \n\tae<|>usrKÅιu0301̈́")
    | st.text(alphabet="the quick\u212b\u0301", min_size=50)
)


def bound_of(tokenizer: Tokenizer) -> int | None:
    return longest_token_bytes(json.loads(tokenizer.to_str()))


@pytest.mark.parametrize("kind", BOUNDED)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens(kind: str, text: str) -> None:
    tokenizer = BOUNDED[kind]
    longest = bound_of(tokenizer)
    assert longest is not None
    tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert len(text.encode()) <= tokens * longest


def test_the_longest_token_is_reached() -> None:
    tokenizer = byte_level()
    longest = max(tokenizer.get_vocab(with_added_tokens=True), key=len)
    assert bound_of(tokenizer) == len(longest)


def without_a_byte() -> Tokenizer:
    fields = json.loads(byte_level().to_str())
    # "Ā" stands for the byte 0, of which no merge is made.
    del fields["model"]["vocab"]["Ā"]
    return Tokenizer.from_str(json.dumps(fields))


def with_(change: Callable[[Tokenizer], object]) -> Tokenizer:
    tokenizer = byte_level()
    change(tokenizer)
    return tokenizer


def strips(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])


def replaces(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Replace("  ", " ")


def removes(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )


def absorbs(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<mask>", rstrip=True, special=True)])


@pytest.mark.parametrize(
    "tokenizer",
    [
        metaspace(),
        word_piece(),
        word_suffix(),
        without_a_byte(),
        *(with_(change) for change in (strips, replaces, removes, absorbs)),
    ],
)
def test_of_a_tokenizer_that_may_lose_text_nothing_is_said(tokenizer: Tokenizer) -> None:
    assert bound_of(tokenizer) is None


def test_no_character_is_composed_of_more_bytes() -> None:
    """Over all of Unicode: what one character is composed of, each part in its longest spelling."""
    spelled: dict[str, int] = {}
    for code in range(sys.maxunicode + 1):
        if not 0xD800 <= code < 0xE000:
            parts = unicodedata.normalize("NFD", chr(code))
            if len(parts) == 1:
                spelled[parts] = max(spelled.get(parts, 0), len(chr(code).encode()))
    worst = max(
        sum(spelled[part] for part in unicodedata.normalize("NFD", composed)) / len(composed.encode())
        for code in range(sys.maxunicode + 1)
        if not 0xD800 <= code < 0xE000 and unicodedata.normalize("NFC", composed := chr(code)) == composed
    )
    assert 3 < worst <= COMPOSED_BYTES
