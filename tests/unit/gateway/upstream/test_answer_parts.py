"""What a server's answer has beside text: read, bounded, counted and put together again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.requests.dialects.chat_message import message
from gateway.upstream.answer_parts import (
    MAX_ANNOTATION_BYTES,
    MAX_CALLS,
    MAX_DEPTH,
    MAX_ID_CHARACTERS,
    MAX_WORD_CHARACTERS,
    Garbage,
)
from gateway.upstream.lease_buffer import BufferedChunk, runs
from gateway.upstream.openai import response
from gateway.upstream.openai.response_reader import Echo, ResponseReader, StreamedResponse, WholeResponse
from gateway.upstream.openai.token_count import MARK_TOKENS, TokenCount, estimated_tokens
from gateway.upstream.part_text import CallText, Completeness, JsonEnd

Answer = dict[str, Any]


def words_in(text: str) -> int:
    """A tokenizer that makes one token of four letters, and one of each other character but blanks."""
    return len(re.findall(r"[a-z]{1,4}|[^ ]", text, re.DOTALL))


def letters_in(text: str) -> int:
    """One that makes a token of each blank, too."""
    return len(re.findall(r"[a-z]{1,4}|.", text, re.DOTALL))


def call(arguments: str, *, name: str = "get_weather", number: int = 0) -> Answer:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def whole(said: Answer, finish: str = "stop", usage: Answer | None = None) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant"} | said, "finish_reason": finish}
    return json.dumps({"choices": [choice], "usage": usage}).encode()


def streamed(deltas: Sequence[Answer], finish: str = "stop", usage: Answer | None = None) -> bytes:
    choices: list[Answer] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    events: list[Answer] = [{"choices": [choice]} for choice in choices]
    if usage is not None:
        events.append({"choices": [], "usage": usage})
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


def read(reader: ResponseReader, data: bytes) -> list[BufferedChunk]:
    pieces = [*reader.feed(data), *reader.close()]
    if reader.fault is not None:
        raise reader.fault
    return pieces


def message_of(pieces: Sequence[BufferedChunk]) -> Answer:
    found = runs(pieces)
    return message("".join(each.text for each in found), [part for each in found for part in each.parts])


def asked(
    most: int = 1_000, tokenize: Callable[[str], int] | None = None
) -> tuple[StreamedResponse, WholeResponse]:
    return StreamedResponse(TokenCount(most, tokenize)), WholeResponse(TokenCount(most, tokenize))


# ---------------------------------------------------------------- any split gives the same

TEXT = st.text('ab{}":, \\\n\u4f60\U0001f600', min_size=1, max_size=40)
ARGUMENTS = st.dictionaries(
    st.text("ab", min_size=1, max_size=3), TEXT | st.integers() | st.none(), max_size=3
)


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    found: Answer = {"content": draw(st.none() | TEXT)}
    if draw(st.booleans()):
        found[draw(st.sampled_from(["reasoning", "reasoning_content"]))] = draw(TEXT)
    if draw(st.booleans()):
        found["refusal"] = draw(TEXT)
    is_ascii = draw(st.booleans())
    arguments = draw(st.lists(ARGUMENTS, max_size=3))
    if arguments:
        found["tool_calls"] = [
            call(json.dumps(each, ensure_ascii=is_ascii), number=number)
            for number, each in enumerate(arguments)
        ]
    return found


@st.composite
def splits(draw: st.DrawFn) -> tuple[Answer, list[Answer]]:
    """A whole answer, and deltas that make it up: its texts cut anywhere, and sent in any order."""
    answer = draw(answers())

    def cut(text: str) -> list[str]:
        edges = sorted({0, len(text), *draw(st.lists(st.integers(0, len(text)), max_size=4))})
        return [text[start:end] for start, end in pairwise(edges)]

    texts: list[list[Answer]] = [
        [{name: piece} for piece in cut(answer.get(name) or "")]
        for name in ("reasoning", "reasoning_content", "content", "refusal")
    ]
    for index, each in enumerate(answer.get("tool_calls", ())):
        function = each["function"]
        begun = {"index": index, "id": each["id"], "type": "function"}
        name = {"tool_calls": [begun | {"function": {"name": function["name"], "arguments": ""}}]}
        arguments = [
            {"index": index, "function": {"arguments": piece}} for piece in cut(function["arguments"])
        ]
        texts.append([name, *({"tool_calls": [each]} for each in arguments)])
    turns = [number for number, text in enumerate(texts) for _ in text]
    if draw(st.booleans()):
        turns = draw(st.permutations(turns))
    return answer, [{"role": "assistant", "content": ""}, *(texts[turn].pop(0) for turn in turns)]


@given(
    split=splits(),
    completion=st.none() | st.integers(0, 400),
    tokenize=st.sampled_from([words_in, letters_in, len, None]),
)
@settings(deadline=None)
def test_any_split_of_an_answer_gives_the_same_message_and_the_same_charge(
    split: tuple[Answer, list[Answer]], completion: int | None, tokenize: Callable[[str], int] | None
) -> None:
    answer, deltas = split
    usage = None if completion is None else {"prompt_tokens": 3, "completion_tokens": completion}
    by_event, at_once = asked(tokenize=tokenize)
    in_pieces = read(by_event, streamed(deltas, usage=usage))
    as_one = read(at_once, whole(answer, usage=usage))
    expected = {"role": "assistant", "content": None, "refusal": None} | answer
    if all(name in ("role", "content") or not value for name, value in expected.items()):
        expected["content"] = expected["content"] or ""
    assert message_of(in_pieces) == message_of(as_one) == expected
    assert by_event.count.final() == at_once.count.final()


@given(split=splits(), most=st.integers(1, 30), tokenize=st.sampled_from([words_in, None]))
@settings(deadline=None)
def test_of_an_answer_that_is_too_long_only_its_beginning_is_passed_on(
    split: tuple[Answer, list[Answer]], most: int, tokenize: Callable[[str], int] | None
) -> None:
    answer, deltas = split
    by_event, at_once = asked(most, tokenize)
    for reader, data in ((by_event, streamed(deltas)), (at_once, whole(answer))):
        found = message_of(read(reader, data))
        assert reader.count.final()[0] <= most
        assert (answer["content"] or "").startswith(found["content"] or "")
        calls = answer.get("tool_calls", [])
        for mine, theirs in zip(found.get("tool_calls", []), calls, strict=False):
            assert theirs["function"]["arguments"].startswith(mine["function"]["arguments"])


# ---------------------------------------------------------------- shapes and bounds


def test_a_part_comes_back_under_the_name_that_the_server_gives_it() -> None:
    both = {"reasoning": "hm", "reasoning_content": "hm"}
    chunk = response.chunk(whole(both | {"content": "a"}))
    (part,) = chunk.before
    assert (part.value, part.text) == (both, "hm"), "generated once, told twice"
    differing = response.chunk(whole({"reasoning": "a", "reasoning_content": "b"}))
    assert [each.text for each in differing.before] == ["b", "a"]
    legacy = response.chunk(whole({"content": None, "function_call": {"name": "f", "arguments": "{}"}}))
    assert [each.value for each in legacy.after] == [{"function_call": {"name": "f", "arguments": "{}"}}]


def test_annotations_come_back_and_count_for_nothing() -> None:
    cited = [{"type": "url_citation", "url_citation": {"url": "https://example.org/", "title": "x" * 500}}]
    for reader, data in zip(
        asked(tokenize=words_in),
        (
            streamed([{"content": "See"}, {"annotations": cited}]),
            whole({"content": "See", "annotations": cited}),
        ),
        strict=True,
    ):
        assert message_of(read(reader, data)) == message("See", [{"annotations": cited}])
        assert reader.count.final() == (words_in("See"), "tokenizer")


def test_a_whole_message_says_whether_its_content_is_null() -> None:
    for content in (None, ""):
        _, reader = asked()
        pieces = read(reader, whole({"content": content, "tool_calls": [call("{}")]}, "tool_calls"))
        assert message_of(pieces)["content"] == content
        assert (reader.finish, reader.finish_word) == ("stop", "tool_calls")
    _, reader = asked()
    assert message_of(read(reader, whole({"content": None}))) == message("", [])


DEEP: Any = 1
for _ in range(MAX_DEPTH + 1):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    "said",
    [
        {"tool_calls": [call("{}")] * (MAX_CALLS + 1)},
        {"tool_calls": [{"index": 0}]},
        {"tool_calls": [call("{}", name="x" * (MAX_WORD_CHARACTERS + 1))]},
        {"tool_calls": [call("{}") | {"id": "x" * (MAX_ID_CHARACTERS + 1)}]},
        {"tool_calls": [{"function": {"name": "f", "arguments": {"city": "Paris"}}}]},
        {"tool_calls": {"0": call("{}")}},
        {"reasoning": ["hm"]},
        {"annotations": ["x"]},
        {"annotations": [DEEP]},
        {"annotations": [{"a": "x" * MAX_ANNOTATION_BYTES}]},
        {"function_call": "f"},
    ],
    ids=lambda said: next(iter(said)),
)
def test_what_is_not_in_shape_or_too_large_is_garbage(said: Answer) -> None:
    with pytest.raises(Garbage):
        response.chunk(whole(said))


@pytest.mark.parametrize("index", [-1, MAX_CALLS, 10**9])
def test_an_index_of_a_call_is_bounded(index: int) -> None:
    event = {"choices": [{"delta": {"tool_calls": [{"index": index, "function": {"arguments": "a"}}]}}]}
    with pytest.raises(Garbage, match="index"):
        response.chunk(json.dumps(event).encode())


def test_annotations_nested_too_deep_for_json_are_garbage() -> None:
    nested = b"[" * 30_000 + b"]" * 30_000
    with pytest.raises(Garbage):
        response.chunk(b'{"choices": [{"delta": {"annotations": ' + nested + b"}}]}")


def test_endless_annotations_and_ids_end_as_garbage() -> None:
    note = {"annotations": [{"type": "url_citation", "url": "x" * 60_000}]}
    fragment = {"tool_calls": [{"index": 0, "id": "i" * MAX_WORD_CHARACTERS}] * MAX_CALLS}
    for delta in (note, fragment):
        reader, _ = asked(10)
        reader.feed(streamed([delta] * 20))
        assert isinstance(reader.fault, Garbage) or reader.is_overrun


# ---------------------------------------------------------------- counts


def test_a_calls_words_are_counted_and_not_how_the_server_writes_them() -> None:
    plain = '{"city":"\u4f60\u597d \U0001f600"}'
    escaped = json.dumps(json.loads(plain), indent=4)
    counted = [words_in(CallText().words(each)) for each in (plain, escaped)]
    assert counted[0] == counted[1] == words_in("city\u4f60\u597d\U0001f600")
    in_fragments = CallText()
    text = "".join([in_fragments.words(each) for each in escaped])
    assert text.split() == CallText().words(escaped).split()
    assert CallText().words("\\ud83d").isascii(), "half a pair is no character"


@pytest.mark.parametrize("tokenize", [words_in, None])
def test_a_usage_below_the_words_of_a_tool_call_is_not_believed(
    tokenize: Callable[[str], int] | None,
) -> None:
    said = {"content": None, "tool_calls": [call(json.dumps({"a": "word " * 500}))]}
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    both = (streamed([said], usage=usage), whole(said, usage=usage))
    for reader, data in zip(asked(tokenize=tokenize), both, strict=True):
        read(reader, data)
        assert reader.count.contradiction == "usage_low"
        assert reader.count.final()[0] >= 500 * 5 // 16


def test_without_usage_a_tool_call_is_charged_by_its_bytes_and_a_margin() -> None:
    said = {"content": None, "reasoning": "hm", "tool_calls": [call('{"a": 1}')]}
    characters = len("hm" + "get_weather" + '{"a": 1}')
    for reader, data in zip(asked(tokenize=words_in), (streamed([said]), whole(said)), strict=True):
        read(reader, data)
        assert reader.count.final() == (estimated_tokens(characters) + MARK_TOKENS, "estimate")
    few, _ = asked(5)
    read(few, streamed([said]))
    assert few.count.final() == (5, "estimate"), "never above what it was asked for"


def test_a_tool_call_that_is_too_long_is_not_cut_in_two() -> None:
    said = {"reasoning": "abcd" * 4, "content": "efgh", "tool_calls": [call('{"a": "' + "word" * 400 + '"}')]}
    for reader, data in zip(asked(5, words_in), (streamed([said]), whole(said)), strict=True):
        found = message_of(read(reader, data))
        assert found == {"role": "assistant", "content": "efgh", "refusal": None, "reasoning": "abcd" * 4}
        assert (reader.finish, reader.finish_word, reader.is_overrun) == ("length", "", True)


# ---------------------------------------------------------------- beside the text


PROMPT = "one two, three four"
REST = " five six"
IDS = list(range(6))


def echoed(prompt: str, *, as_stream: bool, usage: bool = True) -> bytes:
    """A text completion that begins with its prompt, as vLLM sends it: the first event has all of that."""
    tokens = prompt.split() + REST.split()
    pieces = [prompt + REST[:5], REST[5:]] if as_stream else [prompt + REST]
    choices: list[Answer] = [{"text": text, "finish_reason": None} for text in pieces]
    choices[0]["logprobs"] = {"tokens": tokens, "token_logprobs": [None, *[-1.0] * (len(tokens) - 1)]}
    choices[-1]["finish_reason"] = "length"
    counted = {"usage": {"prompt_tokens": 4, "completion_tokens": 2}} if usage else {}
    events = [{"choices": [choice]} for choice in choices]
    events[-1] |= counted
    if not as_stream:
        return json.dumps(events[0]).encode()
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode() + b"data: [DONE]\n\n"


@pytest.mark.parametrize("tokenize", [words_in, None])
@pytest.mark.parametrize("as_stream", [False, True])
@pytest.mark.parametrize("sent", [PROMPT, IDS])
def test_an_echoed_prompt_passes_whole_and_is_no_output(
    tokenize: Callable[[str], int] | None, as_stream: bool, sent: str | list[int]
) -> None:
    kind = StreamedResponse if as_stream else WholeResponse
    reader = kind(TokenCount(2, tokenize), Echo(sent))
    pieces = read(reader, echoed(PROMPT, as_stream=as_stream))
    assert "".join(piece.text for piece in pieces) == PROMPT + REST
    assert (pieces[0].tokens, len(pieces[0].logprobs)) == (0, 6), "with its log probabilities"
    assert sum(piece.tokens for piece in pieces) <= 2
    assert (reader.count.final(), reader.count.contradiction) == ((2, "upstream"), "")
    assert pieces[0].text == PROMPT if sent == PROMPT else pieces[0].text.startswith(PROMPT)


def test_what_is_no_echo_counts_as_output() -> None:
    """Of a server that takes the field and echoes nothing, or something else."""
    reader = WholeResponse(TokenCount(100, words_in), Echo("something else"))
    read(reader, echoed(PROMPT, as_stream=False, usage=False))
    assert reader.count.final() == (words_in(PROMPT + REST), "tokenizer")
    in_pieces = Echo("abcdef")
    found = [in_pieces.split(response.Chunk(text), 1) for text in ("abc", "def", "ghi")]
    assert [[piece.text for piece in passed] for passed, _ in found] == [["abc"], ["def"], []]
    assert found[-1][1].text == "ghi"


def test_ids_and_log_probabilities_of_tokens_stand_beside_an_answer() -> None:
    about = {"prompt_token_ids": [1, 2], "prompt_logprobs": [None, {"2": {"logprob": -1.5, "rank": 1}}]}
    choice = {"message": {"content": "a b"}, "token_ids": [3, 4, 5], "finish_reason": "length"}
    in_whole = json.dumps({"choices": [choice]} | about).encode()
    events: list[Answer] = [
        {"choices": [{"delta": {"content": ""}}]} | about,
        {"choices": [{"delta": {"content": "a "}, "token_ids": [3]}]},
        {"choices": [{"delta": {"content": "b"}, "token_ids": [4, 5], "finish_reason": "length"}]},
    ]
    in_stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
    for reader, data in zip(asked(2, words_in), (in_stream, in_whole), strict=True):
        read(reader, data)
        assert reader.choice_fields == about | {"token_ids": [3, 4]}, "as many as were asked for"
        assert reader.count.final()[0] == 2


@pytest.mark.parametrize("wrong", [{"token_ids": "x"}, {"prompt_logprobs": [{"1": {"a": [[1]]}}]}])
def test_ids_and_log_probabilities_of_another_shape_are_garbage(wrong: Answer) -> None:
    with pytest.raises(Garbage):
        response.chunk(json.dumps({"choices": [{"text": "a"} | wrong]}).encode())


# ---------------------------------------------------------------- incomplete answers


JSON = st.recursive(
    st.none() | st.booleans() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(value=JSON, where=st.integers(0, 10**6), is_ascii=st.booleans())
@settings(deadline=None)
def test_the_end_of_json_is_found_in_any_pieces_and_nowhere_before(
    value: Any, where: int, is_ascii: bool
) -> None:
    text = json.dumps({"value": value}, ensure_ascii=is_ascii)
    place = where % len(text)
    end = JsonEnd()
    end.feed(text[:place])
    assert not end.is_reached
    end.feed(text[place:])
    assert end.is_reached


@pytest.mark.parametrize(
    ("fragments", "finish", "lacking"),
    [
        (['{"a": 1}'], "stop", ""), (['{"a": ', "1}"], "budget", ""), (['{"a": '], "length", "tool_calls"),
        (['{"a": "}'], "stop", "tool_calls"), ([""], "stop", ""), ([""], "budget", "tool_calls"),
    ],
)  # fmt: skip
def test_a_tool_call_is_incomplete_until_its_arguments_have_ended(
    fragments: list[str], finish: str, lacking: str
) -> None:
    for key in ("tool_calls", "function_call"):
        answer = Completeness("")
        for each in fragments:
            function = {"arguments": each}
            part = [{"index": 0, "function": function}] if key == "tool_calls" else function
            answer.feed([{key: part}], "")
        assert answer.lacking(finish) == lacking


def test_a_text_that_is_to_be_json_is_incomplete_where_it_was_cut() -> None:
    found = []
    for text in ('{"a": 1', '{"a": 1}'):
        answer = Completeness("json")
        answer.feed((), text)
        found += [answer.lacking(finish) for finish in ("length", "budget", "stop")]
    assert found == ["json", "json", "", "", "", ""]
    plain = Completeness("")
    plain.feed((), "{")
    assert plain.lacking("length") == ""
