"""Chunks built from their frame equal those built the plain way."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.messages import SamplingParams, TokenLogprob
from gateway.domain.call import Call
from gateway.requests.dialects import chat as chat_dialect
from gateway.requests.dialects.chat import TextChunks
from tenants.types import Principal, Tier

PRINCIPAL = Principal("t", "t", "p", "k", "x", 1.0, frozenset(), Tier.STANDARD, frozenset(Tier), None)
CALL = Call("req_1", True, "a/model", PRINCIPAL, Tier.BATCH, ([1],), 3, 9, SamplingParams(), True, True, 1)


@given(
    texts=st.lists(st.text(max_size=20), min_size=1, max_size=4),
    chat=st.booleans(),
    include_usage=st.booleans(),
    logprobs=st.sampled_from([None, 0, 2]),
)
@settings(deadline=None)
def test_a_framed_chunk_is_the_plain_one(
    texts: list[str], chat: bool, include_usage: bool, logprobs: int | None
) -> None:
    sampling = SamplingParams(logprobs=logprobs)
    call = replace(CALL, chat=chat, include_usage=include_usage, sampling=sampling)
    chunks = TextChunks(call)
    for number, text in enumerate(texts):
        index = number % call.choices
        assert chunks.event(index, text) == chat_dialect.server_sent(
            chat_dialect.text_chunk(call, index, text, (), 0)
        )


@pytest.mark.parametrize("is_streamed", [True, False])
def test_the_sampled_token_stands_in_the_top_ones(is_streamed: bool) -> None:
    """As the last, where it is none of the most likely; of two tokens that read alike it is the one shown."""
    sampled = TokenLogprob(7, "?", -9.0, [(1, "a", -0.1), (2, "?", -3.0)])
    among = TokenLogprob(1, "a", -0.1, [(1, "a", -0.1), (2, "b", -3.0)])

    def tops(logprobs: int, chat: bool) -> list[Any]:
        call = replace(CALL, chat=chat, stream=is_streamed, sampling=SamplingParams(logprobs=logprobs))
        chunk = chat_dialect.text_chunk(call, 0, "?a", [sampled, among], 0)
        shown = chunk["choices"][0]["logprobs"]
        return [each["top_logprobs"] for each in shown["content"]] if chat else shown["top_logprobs"]

    assert [[(each["token"], each["logprob"]) for each in top] for top in tops(2, True)] == [
        [("a", -0.1), ("?", -3.0), ("?", -9.0)],
        [("a", -0.1), ("b", -3.0)],
    ]
    assert tops(2, False) == [{"a": -0.1, "?": -9.0}, {"a": -0.1, "b": -3.0}]
    assert tops(0, True) == [[], []], "none were asked for"


@given(
    text=st.text(st.characters(codec="utf-8") | st.sampled_from("\x0b\x0c\x1c\x85\u2028\u2029"), max_size=20)
)
@settings(deadline=None)
def test_no_text_breaks_an_events_line(text: str) -> None:
    event = TextChunks(CALL).event(0, text)
    line, nothing = event.decode().splitlines()
    assert not nothing
    chunk = msgspec.json.decode(line.removeprefix("data: "))
    assert chunk["choices"][0]["delta"]["content"] == text


@pytest.mark.parametrize("text", ["\ue000", "\ue000\ue000", '"', "\\", "\n\n", ""])
def test_no_text_breaks_the_frame(text: str) -> None:
    expected = chat_dialect.server_sent(chat_dialect.text_chunk(CALL, 0, text, (), 0))
    assert TextChunks(CALL).event(0, text) == expected
