"""Incremental text equals what the tokenizer decodes, cut at the stop string."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from engine.core.detokenizer import (
    CONTEXT_TOKENS,
    REPLACEMENT,
    DetokenizerFactory,
    IncrementalText,
    NoTokenizer,
    StopStrings,
    load_texts,
)
from engine.messages import SamplingParams
from tests.models.tokenizers import KINDS, SPECIAL

FEW = settings(max_examples=60, deadline=None)
texts = st.text(
    st.one_of(
        st.sampled_from(" \n\taehtzé.,;'0123"),
        st.sampled_from("你好世界。👍🏽👩‍🎉Ж\N{COMBINING ACUTE ACCENT}𝕏"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=60,
)
WORDS = ["the", "lazy", "hello", "world,", "quick", "brown", "isn't", "fox;", "dog", "tired"]


@functools.cache
def factory(kind: str) -> DetokenizerFactory:
    return DetokenizerFactory(KINDS[kind]())


def pieces(text: IncrementalText, token_ids: list[int]) -> list[str]:
    return [*(text.push(token_id) for token_id in token_ids), text.flush()]


def stream(kind: str, token_ids: list[int], stop: tuple[str, ...] = (), prompt: tuple[int, ...] = ()) -> str:
    return "".join(pieces(factory(kind).open(list(prompt), SamplingParams(stop=stop)), token_ids))


def encode(kind: str, text: str) -> list[int]:
    ids: list[int] = factory(kind)._tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def decode(kind: str, token_ids: list[int]) -> str:
    return factory(kind).decode(token_ids)


@pytest.mark.parametrize("kind", list(KINDS))
@FEW
@given(text=texts)
@example(text=" leading, and  double  spaces ")
@example(text="👩‍👩‍👧👍🏽你好")
def test_the_pieces_of_any_text_are_its_decoding(kind: str, text: str) -> None:
    token_ids = encode(kind, text)
    assert stream(kind, token_ids) == decode(kind, token_ids)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "byte-fallback"])
@FEW
@given(data=st.data())
def test_the_pieces_of_any_tokens_are_their_decoding(kind: str, data: st.DataObject) -> None:
    """Bytes that are no UTF-8, special tokens, ids that the tokenizer does not have."""
    vocabulary = factory(kind)._tokenizer.get_vocab_size()
    token_ids = data.draw(st.lists(st.integers(0, vocabulary + 3), max_size=60))
    assert stream(kind, token_ids) == decode(kind, token_ids)


@FEW
@given(data=st.data())
@example(data=None)
def test_invalid_bytes_of_a_byte_fallback_tokenizer_cost_nothing_outside_of_their_run(
    data: st.DataObject | None,
) -> None:
    """Such a decoder takes back a whole run of byte tokens when one is wrong; what is out cannot be."""
    tokenizer = factory("byte-fallback")._tokenizer
    token_ids = encode("byte-fallback", "a👍🏽👍")[:-1] + encode("byte-fallback", "hello")
    if data is not None:
        token_ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=60))
    pattern, run = "", b""
    for token_id in [*token_ids, *encode("byte-fallback", "a")]:
        token = tokenizer.id_to_token(token_id)
        if token is None or token in (*SPECIAL, "<unk>"):
            continue
        if re.fullmatch("<0x..>", token):
            run += bytes([int(token[3:5], 16)])
            continue
        pattern += run_pattern(run) + re.escape(token.replace("▁", " "))
        run = b""
    shown = stream("byte-fallback", [*token_ids, *encode("byte-fallback", "a")])
    assert re.fullmatch(pattern, shown, re.DOTALL) or re.fullmatch(pattern, " " + shown, re.DOTALL)


def run_pattern(run: bytes) -> str:
    try:
        return re.escape(run.decode())
    except UnicodeDecodeError:
        return f".{{1,{2 * len(run)}}}"  # characters that are out, and a replacement for each byte


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
@FEW
@given(text=texts)
def test_no_piece_holds_half_a_character(kind: str, text: str) -> None:
    assume(REPLACEMENT not in text)
    for piece in pieces(factory(kind).open([], SamplingParams()), encode(kind, text)):
        assert REPLACEMENT not in piece


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_character_comes_with_its_last_byte(kind: str) -> None:
    token_ids = encode(kind, "a\N{OGHAM LETTER BEITH}b")
    before = encode(kind, "a")
    text = factory(kind).open([], SamplingParams())
    shown = [text.push(token_id) for token_id in token_ids]
    assert len(token_ids) >= len(before) + 4
    assert "".join(shown[:-1]) == "a\N{OGHAM LETTER BEITH}"
    assert shown[len(token_ids) - 2] == "\N{OGHAM LETTER BEITH}"
    assert shown[-1] == "b"


def test_bytes_that_never_make_a_character_do_not_wait_for_ever() -> None:
    """And cost a bounded window: a model that has gone mad must not slow its neighbours down."""
    lead = encode("byte-level", "\N{OGHAM LETTER BEITH}")[0]
    text = factory("byte-level").open([], SamplingParams())
    shown = ""
    for count in range(1, 200):
        shown += text.push(lead)
        assert len(shown) >= count - 12
        assert len(text._detokenizer._window) < 40
    shown += text.flush()
    assert shown == REPLACEMENT * 199


@settings(deadline=None)
@given(codes=st.lists(st.sampled_from([0xF0, 0x9F, 0x91, 0x8D, 0xE4, 0xBD, 0xA0, 0xC3, 0x61]), max_size=40))
@example(codes=[0xF0] * 12 + [0xF0, 0x9F, 0x91, 0x8D] * 3)
@example(codes=[0x8D] * 6 + [0xF0, 0x9F, 0x91, 0x8D, 0x8D, 0x8D, 0xE4, 0xBD, 0xA0] * 2)
def test_bytes_in_any_order_are_their_decoding(codes: list[int]) -> None:
    """Characters, halves of characters and nonsense, one byte a token."""
    token_ids = [byte_token(code) for code in codes]
    assert stream("byte-level", token_ids) == bytes(codes).decode(errors="replace")


def byte_token(code: int) -> int:
    """The byte-level tokenizer's token for one byte (GPT-2's printable stand-ins)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    token = chr(code) if code in printable else chr(0x100 + others.index(code))
    token_id: int = factory("byte-level")._tokenizer.token_to_id(token)
    return token_id


def test_half_a_character_at_the_end_is_flushed_as_the_tokenizer_decodes_it() -> None:
    token_ids = encode("byte-level", "ok \N{OGHAM LETTER BEITH}")[:-1]
    text = factory("byte-level").open([], SamplingParams())
    assert "".join(text.push(token_id) for token_id in token_ids) == "ok "
    assert text.flush() == REPLACEMENT
    assert text.flush() == ""


@pytest.mark.parametrize("kind", list(KINDS))
@FEW
@given(text=texts, stop=st.lists(st.text(st.sampled_from(" aehtz你.é"), min_size=1, max_size=4), max_size=4))
def test_the_answer_ends_before_the_stop_string_that_is_complete_first(
    kind: str, text: str, stop: list[str]
) -> None:
    token_ids = encode(kind, text)
    whole = decode(kind, token_ids)
    incremental = factory(kind).open([], SamplingParams(stop=tuple(stop)))
    shown = "".join(pieces(incremental, token_ids))
    assert shown == cut(whole, stop)
    assert incremental.stopped in (stop if any(text in whole for text in stop) else [""])
    assert whole.startswith(shown + incremental.stopped)


def cut(whole: str, stop: list[str]) -> str:
    """Character by character: the first stop string to be complete, the longest of several."""
    for end in range(len(whole) + 1):
        ends = [text for text in stop if whole[:end].endswith(text)]
        if ends:
            return whole[: end - max(map(len, ends))]
    return whole


@settings(deadline=None)
@given(
    text=st.text("ab ", max_size=30),
    stop=st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=30, max_size=30),
)
@example(text="xabab", stop=["abab", "ba"], cuts=[5] * 30)
@example(text="xabab", stop=["abab", "bab"], cuts=[5] * 30)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    stops = StopStrings(stop)
    shown, rest = "", text
    for size in cuts:
        shown += stops.push(rest[:size])
        rest = rest[size:]
        assert cut(text, stop).startswith(shown), "something was shown that belongs to a stop string"
    shown += stops.flush()
    assert shown == cut(text, stop)


def test_what_may_become_a_stop_string_is_held_back_and_nothing_else() -> None:
    stops = StopStrings(["###", "STOP"])
    assert stops.push("one ST") == "one "
    assert stops.push("UP ##") == "STUP "
    assert stops.push("x") == "##x"
    assert stops.push("y##") == "y"
    assert stops.flush() == "##"
    assert not stops.found


def test_after_a_stop_nothing_comes() -> None:
    text = factory("byte-level").open([], SamplingParams(stop=("lazy",)))
    shown = "".join(pieces(text, encode("byte-level", "the lazy dog")))
    assert shown == "the "
    assert text.stopped
    assert text.push(5) == ""


@pytest.mark.parametrize("kind", ["byte-fallback", "metaspace"])
def test_a_completion_keeps_its_leading_space_and_an_answer_has_none(kind: str) -> None:
    prompt, output = encode(kind, "hello"), encode(kind, "hello world")[len(encode(kind, "hello")) :]
    special = factory(kind)._tokenizer.token_to_id("<|user|>")
    assert stream(kind, output, prompt=tuple(prompt)) == " world"
    assert stream(kind, output, prompt=(*prompt, special)) == "world"
    assert stream(kind, output) == "world"


@pytest.mark.parametrize("kind", list(KINDS))
@FEW
@given(words=st.lists(st.sampled_from(WORDS), min_size=2, max_size=12), share=st.floats(0.1, 0.9))
def test_after_a_prompt_comes_what_continues_it(kind: str, words: list[str], share: float) -> None:
    """Wherever the tokens of a text are divided into prompt and output."""
    token_ids = encode(kind, " ".join(words))
    at = max(1, int(share * len(token_ids)))
    context, output = token_ids[:at][-CONTEXT_TOKENS:], token_ids[at:]
    expected = decode(kind, context + output).removeprefix(decode(kind, context))
    assert stream(kind, output, prompt=tuple(token_ids[:at])) == expected


@pytest.mark.parametrize("kind", list(KINDS))
def test_special_tokens_have_no_text_but_a_name(kind: str) -> None:
    special = [factory(kind)._tokenizer.token_to_id(text) for text in SPECIAL]
    assert stream(kind, special) == ""
    assert [factory(kind).token_text(token_id).strip() for token_id in special] == SPECIAL


def test_a_directory_without_a_readable_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoTokenizer, match=r"has no tokenizer\.json"):
        load_texts(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(NoTokenizer, match=r"tokenizer\.json cannot be read"):
        load_texts(tmp_path)


def test_a_tokenizer_is_read_from_a_model_directory(tmp_path: Path) -> None:
    tokenizer = KINDS["byte-level"]()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    token_ids = tokenizer.encode("hello world").ids
    text = load_texts(tmp_path).open([], SamplingParams())
    assert "".join(pieces(text, token_ids)) == "hello world"


def test_text_needs_no_torch() -> None:
    """The whole of it must run next to a runner, and without one."""
    script = "import sys, engine.core.detokenizer; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "metaspace"])
def test_a_tokens_own_text_keeps_its_leading_space(kind: str) -> None:
    token_ids = encode(kind, "hello hello world")
    own = [factory(kind).token_text(token_id) for token_id in token_ids]
    assert "".join(own).strip() == "hello hello world"
    assert own == [factory(kind).open([], SamplingParams()).logprob_text(token_id) for token_id in token_ids]
