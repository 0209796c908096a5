"""Parsing of another server's bytes into tokens, for any pieces and leases."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import SamplingParams, Submit, TokenLogprob
from gateway.budget.token_cap import most_tokens
from gateway.upstream.answer_parts import AnswerPart, Garbage
from gateway.upstream.base import ServerLogprob, Wording
from gateway.upstream.http.sse import EventTooLarge, SseParser
from gateway.upstream.lease_buffer import BufferedChunk, End, LeaseBuffer, runs
from gateway.upstream.openai import request as openai_request
from gateway.upstream.openai import response
from gateway.upstream.openai.request import PriorityStyle, UsageWish
from gateway.upstream.openai.response import Chunk, Meaning, Usage
from gateway.upstream.openai.token_count import (
    BORDER_TOKENS,
    LONGEST_TOKEN_BYTES,
    OVERRUN_CHUNKS,
    OVERRUN_FACTOR,
    SEGMENT_CHARACTERS,
    TokenCount,
)
from gateway.upstream.server_logprobs import MAX_ALTERNATIVES, MAX_TOKEN_CHARACTERS
from tenants.quota.store import LimitState
from tenants.types import Amounts, Limit, LimitMode, Meter, SubjectKind, Window
from tests.support import builders

# ---------------------------------------------------------------- events


@given(
    events=st.lists(st.text(st.characters(blacklist_characters="\r\n", codec="utf-8")), max_size=6),
    newline=st.sampled_from(["\n", "\r\n"]),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
@settings(deadline=None)
def test_events_are_found_however_the_stream_is_cut(events: list[str], newline: str, cuts: list[int]) -> None:
    stream = f": comment{newline}{newline}" + "".join(
        f"event: x{newline}data: {event}{newline}{newline}" for event in events
    )
    data = stream.encode()
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    parser, found = SseParser(), []
    for start, end in pairwise(edges):
        found += parser.feed(data[start:end])
    assert [each.decode() for each in found] == events
    assert parser.is_between_events


def test_lines_of_one_event_belong_together_and_a_huge_one_is_refused() -> None:
    assert SseParser().feed(b"data: a\ndata:b\n\n") == [b"a\nb"]
    parser = SseParser(max_event_bytes=100)
    with pytest.raises(EventTooLarge):
        parser.feed(b"data: " + b"x" * 200)


# ---------------------------------------------------------------- finish reasons and messages


def submit(**fields: Any) -> Submit:
    return builders.submit(**({"request_id": "r", "prompt_token_ids": [1], "max_tokens": 9} | fields))


def sent(sampling: SamplingParams, wording: Wording | None = None, **fields: Any) -> dict[str, Any]:
    body = openai_request.body(
        submit(sampling=sampling),
        wording or Wording(prompt="p"),
        **(
            {
                "model": "m", "max_tokens": 9, "priority": PriorityStyle.NONE, "usage": UsageWish.END,
                "stream": True,
            }
            | fields
        ),
    )  # fmt: skip
    found: dict[str, Any] = msgspec.json.decode(body)
    return found


def test_only_what_was_asked_for_is_sent() -> None:
    always = {"model": "m", "prompt": "p", "max_tokens": 9, "stream": True}
    models_own = SamplingParams(temperature=0.01, top_k=1, repetition_penalty=1.3, stop=("a",), logprobs=2)
    assert sent(models_own, usage=UsageWish.NONE) == always
    said = {"temperature": 1, "top_k": -1, "stop": "a", "ignore_eos": False, "seed": 7}
    found = sent(SamplingParams(seed=8), Wording(prompt="p", sampling=said), usage=UsageWish.NONE)
    assert found == always | said | {"seed": 8}, "a choice has a seed of its own"
    assert sent(SamplingParams(), Wording(prompt=[1, 2]))["prompt"] == [1, 2]
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    past = [{"role": "assistant", "content": "", "tool_calls": [called]}]
    past.append({"role": "tool", "content": "4", "tool_call_id": "c"})
    assert sent(SamplingParams(), Wording(messages=past))["messages"] == past


THOUGHT = Chunk(before=[AnswerPart({"reasoning_content": "hmm"}, "hmm", is_plain=True)], after=[])


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, Chunk()),
        ({"choices": [{"delta": {"content": "hi"}}]}, Chunk("hi")),
        ({"choices": [{"text": "hi", "finish_reason": "length"}]}, Chunk("hi", finish="length")),
        ({"choices": [{"delta": {"reasoning_content": "hmm"}}]}, THOUGHT),
        ({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}, Chunk(usage=Usage(2, 3))),
        (
            {"usage": {"prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": None}},
            Chunk(usage=Usage(2, 3)),
        ),
        ({"id": "x", "object": "unknown", "extra": {"a": [1]}}, Chunk()),
    ],
)  # fmt: skip
def test_a_chunk_is_understood(event: Any, expected: Chunk) -> None:
    assert response.chunk(json.dumps(event).encode()) == expected


def test_logprobs_of_both_kinds_are_understood() -> None:
    top = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]
    chat = {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": top}]}
    text = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -1.5}]}
    for logprobs in (chat, text):
        found = response.chunk(json.dumps({"choices": [{"text": "a", "logprobs": logprobs}]}).encode())
        (item,) = found.logprobs
        assert (item.token_id, item.text, item.logprob) == (0, "a", -0.5)
        assert item.top == [(0, "a", -0.5), (0, "b", -1.5)]


def test_a_servers_entry_of_log_probabilities_is_passed_on_with_its_own_bytes() -> None:
    piece = {"token": "\ufffd", "logprob": -0.5, "bytes": [226, 130], "top_logprobs": []}
    unsaid = {"token": "a", "logprob": -1, "top_logprobs": [{"token": "b", "logprob": -2, "bytes": None}]}
    event = {"choices": [{"delta": {}, "logprobs": {"content": [piece, unsaid | {"secret": 1}]}}]}
    found = response.chunk(json.dumps(event).encode()).logprobs
    assert [each.shown for each in found if isinstance(each, ServerLogprob)] == [
        piece, {"bytes": [97], "token": "a", "logprob": -1.0} | {"top_logprobs": unsaid["top_logprobs"]},
    ]  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        b"{", b"[]", b"3", b"\xff", b'{"choices": 3}', b'{"choices": [{"delta": {"content": 5}}]}',
        b'{"usage": {"prompt_tokens": -1, "completion_tokens": 2}}', b'{"usage": {"completion_tokens": "x"}}',
        b'{"choices": [{"text": "a", "logprobs": {"content": [{}]}}]}',
    ],
)  # fmt: skip
def test_garbage_is_garbage(data: bytes) -> None:
    with pytest.raises(Garbage):
        response.chunk(data)


def test_refusals_mean_what_they_say() -> None:
    for meaning, statuses in {
        Meaning.REFUSED: (400, 413, 422), Meaning.BUSY: (429,), Meaning.KEY: (401,),
        Meaning.UNSURE: (403, 404, 405), Meaning.AWAY: (503,), Meaning.FAILED: (302, 500),
    }.items():  # fmt: skip
        assert {response.meaning(status) for status in statuses} == {meaning}
    assert response.refusal(b"<html>")[0] == "invalid_request"
    code, message, _ = response.refusal(b'{"object": "error", "message": "maximum context length is 5"}')
    assert code == "context_length_exceeded"
    assert message.endswith("of the server that runs this model: maximum context length is 5")


REFUSES = "the server that runs this model refuses "


@pytest.mark.parametrize(
    ("body", "what", "param"),
    [
        # vLLM
        (
            {"error": {"message": "Grammar error: Pointer '/nope' does not exist", "param": None}},
            "the request: Grammar error: Pointer '/nope' does not exist",
            None,
        ),
        (
            {"message": "1 error:\n  {'loc': ('body', 'messages', 0, 'User', 'role'), 'msg': 'no'}"},
            "the field 'messages[0]': 1 error: {'loc': ('body', 'messages', 0, 'User', 'role'), 'msg': 'no'}",
            "messages[0]",
        ),
        # OpenAI
        (
            {"error": {"message": "too large", "code": "bad", "param": "messages.[0].content"}},
            "the field 'messages[0].content': too large",
            "messages[0].content",
        ),
        # FastAPI, SGLang, text-embeddings-inference
        (
            {"detail": [{"loc": ["body", "stop", 2], "msg": "Input should be a string", "input": 5}]},
            "the field 'stop[2]': Input should be a string",
            "stop[2]",
        ),
        ({"object": "error", "message": "no", "param": "min_p"}, "the field 'min_p': no", "min_p"),
        ({"error": "it is empty", "error_type": "Validation"}, "the request: it is empty", None),
        # what is none of our fields, or no refusal at all
        ({"error": {"message": "no", "param": "sk-1234.content"}}, "the request: no", None),
        ({"error": {"message": "no", "param": f"stop.{'x' * 99}"}}, "the field 'stop': no", "stop"),
        ({"detail": [{"loc": 5, "msg": {}}]}, "the request", None),
        ({"error": {"message": 5, "param": 5}}, "the request", None),
        ([], "the request", None),
    ],
)  # fmt: skip
def test_a_servers_reason_reaches_the_client_with_the_field(body: Any, what: str, param: str | None) -> None:
    assert response.refusal(json.dumps(body).encode()) == ("invalid_request", REFUSES + what, param)


def test_a_servers_reason_is_one_short_line_without_keys_and_addresses() -> None:
    said = "key sk-1234 at http://10.0.0.7/v1 of its own s3cret,\x1b[2J\n" + "x " * 5000
    body = json.dumps({"error": {"message": said, "code": "context_length_exceeded"}}).encode()
    told = response.refusal(body, "", "its own s3cret")[1].partition(": ")[2]
    assert told.startswith("key (a key) at (an address) of (its key), [2J x x")
    assert len(told) <= response.MAX_MESSAGE_CHARACTERS


# ---------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Incorrect API key: sk-proj-ab*****9f.", "Incorrect API key: (a key)"),
        ("'Authorization: Bearer abc.def' is refused", "'Authorization: (a key)' is refused"),
        ("fg_live_ab12_cd34, not hf_overrides", "(a key), not hf_overrides"),
        ("token 0123456789abcdef0123456789abcdef01", "token (a key)"),
        ("signed 9aZ/rT0+qWm4xKcV7bN1yLpE5sD8hJ2fG6u==", "signed (a key)"),
        ("its key my secret is wrong", "its key (its key) is wrong"),
        ("cut in the middle: my sec", "cut in the middle: (its key)"),
        ("cannot reach http://10.0.0.7:8000/v1, try", "cannot reach (an address) try"),
        ("10.0.0.7:8000 or 10.0.0.8 or llm-7.prod.svc:8000", "(an address) or (an address) or (an address)"),
        ("[fe80::1]:80 or 2001:db8::7", "(an address) or (an address)"),
        ("at 12:34:56 with vLLM 0.11.2: std::bad_alloc", None),
        ("Pointer '/properties/customers/items/properties/address2' does not exist", None),
        ("no model meta-llama/Llama-3.3-70B-Instruct-AWQ-INT4", None),
        ("id chatcmpl-550e8400-e29b-41d4-a716-446655440000", None),
        ("a" * 100_000, None),
    ],
)
def test_a_servers_words_lose_keys_and_addresses_and_nothing_else(said: str, told: str | None) -> None:
    assert response.without_secrets(said, "", "my secret") == (said if told is None else told)


def test_a_count_in_mid_stream_is_never_more_than_there_were() -> None:
    count = TokenCount(100, None)
    assert [count.saw(Chunk("Hello")), count.saw(Chunk("x" * 64)), count.saw(Chunk())] == [1, 4, 0]
    assert count.saw(Chunk("y", usage=Usage(3, 40))) == 35
    assert count.saw(Chunk(usage=Usage(3, 20))) == 0, "it never falls"
    assert count.final() == (20, "upstream"), "but the last word is the server's"


def test_a_token_without_text_counts_when_its_log_probability_comes() -> None:
    count = TokenCount(100, None)
    logprob = TokenLogprob(0, "a", -0.5)
    assert [count.saw(Chunk("", [logprob] * number)) for number in (1, 3, 0)] == [1, 3, 0]


def test_a_server_that_counts_more_than_it_was_asked_for_or_nothing_is_not_believed() -> None:
    count = TokenCount(5, None)
    count.saw(Chunk("a"))
    count.saw(Chunk(usage=Usage(3, 1_000_000)))
    assert count.tokens == 5
    assert count.final() == (5, "upstream")
    count = TokenCount(50, lambda text: len(text.split()))
    count.saw(Chunk("two words"))
    count.saw(Chunk(usage=Usage(0, 0)))
    assert count.final() == (2, "tokenizer")


def test_an_answer_that_does_not_stop_is_noticed() -> None:
    count = TokenCount(4, None)
    for _ in range(OVERRUN_FACTOR * 4 + OVERRUN_CHUNKS):
        count.saw(Chunk("x"))
    assert not count.is_overrun
    count.saw(Chunk("x"))
    assert count.is_overrun
    assert count.tokens == 4


def words_in(text: str) -> int:
    """A tokenizer that makes one token of four letters, and one of each other character."""
    return len(re.findall(r"[a-z]{1,4}|.", text, re.DOTALL))


@given(
    pieces=st.lists(st.text("abc \U0001f600\ufffd", max_size=700), max_size=12),
    most=st.integers(1, 300),
    tokenize=st.sampled_from([words_in, None]),
)
@settings(deadline=None)
def test_text_that_fits_holds_no_more_tokens_than_were_asked_for(
    pieces: list[str], most: int, tokenize: Callable[[str], int] | None
) -> None:
    count, kept, is_whole = TokenCount(most, tokenize), "", True
    for text in pieces:
        tokens = count.saw(Chunk(text))
        assert 0 <= tokens <= most
        if text:
            assert count.fits is None or 0 <= count.fits <= len(text)
            kept += text[: count.fits]
            is_whole = is_whole and count.fits in (None, len(text))
    everything = "".join(pieces)
    at_once = TokenCount(most, tokenize)
    at_once.saw(Chunk(everything))
    assert count.is_overrun or (count.final(), count.text_tokens) == (at_once.final(), at_once.text_tokens)
    assert everything.startswith(kept)
    assert count.tokens <= most
    if tokenize is None:
        assert len(kept.encode()) <= most * LONGEST_TOKEN_BYTES
        assert is_whole == (len(everything.encode()) <= most * LONGEST_TOKEN_BYTES)
        return
    # A border between two segments may hide two tokens.
    hidden = BORDER_TOKENS * (len(everything) // SEGMENT_CHARACTERS + len(pieces))
    real = words_in(kept.replace("\ufffd", "")) + kept.count("\ufffd") // LONGEST_TOKEN_BYTES
    assert real <= most + hidden
    if words_in(everything) <= most:
        assert is_whole, "an honest answer is not cut"


@pytest.mark.parametrize("tokenize", [words_in, None])
def test_one_huge_chunk_is_cut_without_counting_it_to_its_end(tokenize: Callable[[str], int] | None) -> None:
    counted = 0

    def counting(text: str) -> int:
        nonlocal counted
        counted += len(text)
        return words_in(text)

    count = TokenCount(10, tokenize and counting)
    assert count.saw(Chunk("abcd" * 500_000)) == 10
    assert count.fits == (40 if tokenize else 160)
    assert count.is_overrun
    assert count.contradiction == "overrun"
    assert count.final()[0] == 10
    assert counted < 20_000


def test_log_probabilities_carry_no_more_than_their_tokens() -> None:
    count = TokenCount(3, None)
    logprob = TokenLogprob(0, "a", -0.5)
    assert [len(count.fitting([logprob] * number)) for number in (2, 2, 5)] == [2, 1, 0]
    long = {"token": "x" * 10_000, "logprob": -1.0, "top_logprobs": [{"token": "y", "logprob": -1.0}] * 99}
    event = json.dumps({"choices": [{"text": "a", "logprobs": {"content": [long]}}]}).encode()
    (found,) = response.chunk(event).logprobs
    assert (len(found.text), len(found.top)) == (MAX_TOKEN_CHARACTERS, MAX_ALTERNATIVES)


# ---------------------------------------------------------------- leases


@given(
    sizes=st.lists(st.integers(0, 5), max_size=30),
    leases=st.lists(st.integers(0, 60), max_size=10),
    emitted=st.lists(st.integers(0, 60), max_size=5),
    counted=st.integers(0, 80),
    cut_at=st.integers(0, 50),
)
@settings(deadline=None)
def test_whatever_comes_no_token_passes_its_lease_and_none_is_lost(
    sizes: list[int], leases: list[int], emitted: list[int], counted: int, cut_at: int
) -> None:
    stream = LeaseBuffer(leases[0] if leases else 3)
    steps: list[tuple[str, int]] = [("push", size) for size in sizes]
    for index, lease in enumerate(leases):
        steps.insert((index * 7) % (len(steps) + 1), ("lease", lease))
    for index, tokens in enumerate(emitted):
        steps.insert((index * 5) % (len(steps) + 1), ("emitted", tokens))
    passed, text = 0, ""
    for number, (kind, value) in enumerate(steps):
        if number == cut_at:
            stream.cut("budget", "gateway")
            assert stream.take() == []
            end = stream.ended()
            assert end is not None
            assert end.tokens == passed <= stream.lease_tokens
            return
        if kind == "push":
            stream.push(BufferedChunk(value, f"<{number}>"))
        elif kind == "emitted":
            stream.emitted(value)
        else:
            stream.top_up(value)
        for piece in stream.take():
            passed += piece.tokens
            text += piece.text
        assert passed == stream.passed_tokens <= max(stream.lease_tokens, 0)
    total = max(passed, counted)
    stream.end(End("stop", counted, "upstream"))
    for piece in stream.take():
        passed += piece.tokens
        text += piece.text
    assert (stream.ended() is None) == (stream.held > 0)
    stream.top_up(10**6)
    for piece in stream.take():
        passed += piece.tokens
        text += piece.text
    assert passed == total, "what counts, or was passed on"
    assert text == "".join(f"<{number}>" for number, (kind, _) in enumerate(steps) if kind == "push")
    assert stream.ended() == End("stop", counted, "upstream")


def test_a_piece_that_is_covered_in_part_counts_and_waits() -> None:
    stream = LeaseBuffer(2)
    stream.push(BufferedChunk(3, "abc"))
    assert [(each.tokens, each.text) for each in stream.take()] == [(2, "")]
    stream.top_up(3)
    assert [(each.tokens, each.text) for each in stream.take()] == [(1, "abc")]


def test_what_a_server_says_it_has_emitted_counts_once_and_before_its_content() -> None:
    stream = LeaseBuffer(5)
    passed: list[BufferedChunk] = []
    for step in (lambda: stream.push(BufferedChunk(3, "abc")), lambda: stream.emitted(5),
                 lambda: stream.push(BufferedChunk(1, "d")), lambda: stream.push(BufferedChunk(2, "ef")),
                 lambda: stream.end(End("budget", 5, "upstream"))):  # fmt: skip
        step()
        passed += stream.take()
    assert [(each.tokens, each.text) for each in passed] == [(3, "abc"), (2, ""), (0, "d"), (0, "ef")]
    assert stream.ended() == End("budget", 5, "upstream")


# ---------------------------------------------------------------- bounds


def state(
    meter: Meter, available: int, *, rate: float | None = None, mode: LimitMode = LimitMode.HARD
) -> LimitState:
    window = None if rate is not None else Window.LIFETIME
    limit = Limit("l", "t", SubjectKind.TENANT, "t", meter, 1000, window, rate_per_s=rate, mode=mode)
    return LimitState(limit, 0, 0, available, 0.0)


def size(tokens: int) -> Amounts:
    return Amounts(10, tokens, 10 * 1 + 3 * tokens, requests=1)


@pytest.mark.parametrize(
    ("states", "sequences", "expected"),
    [
        ((), 1, 400),
        ((state(Meter.OUTPUT_TOKENS, 30),), 1, 50),
        ((state(Meter.TOTAL_TOKENS, 30),), 1, 50),
        ((state(Meter.COST_NANOUSD, 30),), 1, 30),
        ((state(Meter.OUTPUT_TOKENS, 30),), 3, 16),
        ((state(Meter.OUTPUT_TOKENS, 0),), 1, 20),
        ((state(Meter.OUTPUT_TOKENS, 0, rate=10.0),), 1, 400),
        ((state(Meter.OUTPUT_TOKENS, 0, mode=LimitMode.SOFT),), 1, 400),
        ((state(Meter.REQUESTS, 0),), 1, 400),
    ],
)
def test_a_server_is_asked_for_what_is_held_and_what_could_be(
    states: tuple[LimitState, ...], sequences: int, expected: int
) -> None:
    covered = size(20)
    assert most_tokens(covered, 20, states, size, sequences, 400) == expected


def test_chunks_are_joined_as_far_as_text_and_parts_keep_their_order() -> None:
    thought, call = {"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]}
    pieces = [
        BufferedChunk(1, parts=(thought,)), BufferedChunk(2, "a", size=3), BufferedChunk(1, "b", size=4),
        BufferedChunk(1, parts=(call,)), BufferedChunk(1, parts=(call,)),
    ]  # fmt: skip
    found = [(each.tokens, each.parts, each.text, each.size) for each in runs(pieces)]
    assert found == [(4, (thought,), "ab", 7), (2, (call, call), "", 0)]
    assert runs([]) == []
