"""Answers of the Responses API: the order of their events; a whole answer is what a stream ends in."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest

from engine.messages import SamplingParams, SequenceOutcome, TokenLogprob
from gateway.domain.account import Account
from gateway.domain.call import Call
from gateway.domain.estimate import Times
from gateway.errors import ApiError
from gateway.requests.dialects.dialect import Choice
from gateway.requests.dialects.responses import read
from gateway.requests.run import Begun, Closed, Event, SequenceEnded, SequenceOutput
from gateway.upstream.base import Part
from tenants.types import Amounts, Tier
from tests.support.builders import principal

CALL = Call("req_1", True, "m", principal(), Tier.STANDARD, ([1],), 1, 9, SamplingParams(), True, False, 7)
ACCOUNT = Account("req_1", "acme", "standard", "completed", None, None, Times(0.0, ended_s=2.0),
                  Amounts(5, 9), Amounts(5, 3), 4, 0, reasoning_tokens=1)  # fmt: skip
BODY: Any = {"model": "m", "input": "hello", "tools": [{"type": "web_search"}], "tool_choice": "auto"}
OPENED = ["created", "in_progress"]
TEXT = ["output_item.added", "content_part.added", *["output_text.delta"] * 2, "output_text.done",
        "content_part.done", "output_item.done"]  # fmt: skip
THOUGHT = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
           "content_part.done", "output_item.done"]  # fmt: skip
ARGUED, ENDED = "function_call_arguments.delta", ["function_call_arguments.done", "output_item.done"]


def said(text: str = "", *parts: Part) -> SequenceOutput:
    return SequenceOutput(0, text, (), parts)


def fragment(index: int, arguments: str = "", **first: str) -> Part:
    function: dict[str, Any] = {"arguments": arguments} | ({"name": first.pop("name")} if first else {})
    return {"tool_calls": [{"index": index, "function": function} | first]}


INTERLEAVED = [
    said("", fragment(0, name="add", id="c0")), said("", fragment(1, '{"b"', name="sub", id="c1")),
    said("", fragment(0, '{"a":')), said("", fragment(1, ":2}"), fragment(0, "1}")),
]  # fmt: skip


def events(*steps: Event, finish: str = "stop", error: ApiError | None = None, **fields: Any) -> list[Any]:
    """What a stream says, each event's name checked against its data."""
    writer = read(msgspec.json.encode(BODY | fields), 9).dialect.writer(CALL)
    ended = [] if error else [SequenceEnded(0, finish)]
    data = b"".join(writer.write(each, error) for each in (*steps, *ended, Closed(ACCOUNT, error)))
    found = []
    for number, event in zip(count(), data.decode().removesuffix("\n\n").split("\n\n"), strict=False):
        name, line = event.split("\n")
        found.append(msgspec.json.decode(line.removeprefix("data: ")))
        assert (name, number) == (f"event: {found[-1]['type']}", found[-1]["sequence_number"])
    return found


def whole(choice: Choice) -> Any:
    body = read(msgspec.json.encode(BODY), 9).dialect.whole(CALL, [choice], ACCOUNT)
    return msgspec.json.decode(msgspec.json.encode(body))


@pytest.mark.parametrize(
    ("steps", "finish", "types"),
    [
        ([said("Hel"), said("lo")], "stop", [*TEXT, "completed"]),
        ([said("Hel"), said("lo")], "length", [*TEXT, "incomplete"]),
        ([said("Hel"), said("lo")], "budget", [*TEXT, "incomplete"]),
        ([], "stop", [each for each in TEXT if each != "output_text.delta"] + ["completed"]),
        ([said("", {"reasoning_content": "Hm"}), said("Hel"), said("lo")], "stop",
         [*THOUGHT, *TEXT, "completed"]),
        ([said("Hel"), said("lo"), *INTERLEAVED], "stop",
         [*TEXT, "output_item.added", "output_item.added", *[ARGUED] * 4, *ENDED, *ENDED, "completed"]),
        ([said("", {"refusal": "No"})], "stop",
         ["output_item.added", "content_part.added", "refusal.delta", "refusal.done", "content_part.done",
          "output_item.done", "completed"]),
        ([said("Hel"), said("", {"annotations": [{"type": "url_citation", "url_citation": {"url": "u"}}]}),
          said("lo")], "stop", [*TEXT[:3], "output_text.annotation.added", *TEXT[3:], "completed"]),
    ],
    ids=["text", "cut", "out of budget", "nothing", "reasoning", "calls", "refusal", "citation"],
)  # fmt: skip
def test_events_come_in_their_order(steps: list[Event], finish: str, types: list[str]) -> None:
    found = events(Begun(), *steps, finish=finish)
    assert [each["type"] for each in found] == [f"response.{each}" for each in (*OPENED, *types)]
    done = {each["output_index"]: each["item"] for each in found if each["type"].endswith("item.done")}
    last = found[-1]["response"]
    assert last["output"] == [done[index] for index in range(len(done))]
    for event in found:  # each is of an item that was added, under its id
        if "item_id" in event:
            assert event["item_id"] == last["output"][event["output_index"]]["id"]
        if event["type"].endswith("output_text.delta"):
            assert event["logprobs"] == []
    assert (last["status"], last["output"][-1]["status"]) == (types[-1],) * 2
    assert last["incomplete_details"] == (
        {"reason": "max_output_tokens"} if types[-1] == "incomplete" else None
    )


def test_a_whole_answer_is_what_a_stream_ends_in() -> None:
    about: list[Part] = [{"reasoning": "Hm"}, {"annotations": [{"type": "file", "id": 1}]}]
    calls = [part for step in INTERLEAVED for part in step.parts]
    streamed = events(Begun(), said("", about[0]), said("Hi", about[1]), *INTERLEAVED)[-1]["response"]
    body = whole(Choice(0, ["Hi"], parts=[*calls, *about], finish="stop"))
    assert body == streamed
    assert [each["type"] for each in body["output"][:2]] == ["reasoning", "message"]
    called = [(each["call_id"], each["name"], each["arguments"]) for each in body["output"][2:]]
    assert called == [("c0", "add", '{"a":1}'), ("c1", "sub", '{"b":2}')]
    assert body["output"][1]["content"][0]["annotations"] == [{"type": "file", "id": 1}]
    assert (body["id"], body["created_at"], body["completed_at"], body["store"]) == ("resp_1", 7, 9, False)
    assert [note["param"] for note in body["fairgate"]["left_out"]] == ["tools[0]"]
    assert body["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 8,
    }


def test_a_failure_is_the_last_event_with_what_there_was() -> None:
    error = ApiError(429, "rate_limit_exceeded", "Lower max_tokens.", retry_after_s=2.0)
    failed = events(Begun(), said("Hel"), said("", fragment(0, '{"a', name="add", id="c0")), error=error)[-1]
    response = failed["response"]
    assert (failed["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"]["code"] == "rate_limit_exceeded"
    assert response["error"]["message"] == "Lower max_output_tokens."
    text, function = response["output"]
    assert (text["content"][0]["text"], function["arguments"]) == ("Hel", '{"a')
    assert function["status"] == "incomplete"
    assert response["usage"]["output_tokens"] == response["fairgate"]["actual"]["output_tokens"] == 3
    assert [each["type"] for each in events(error=error)] == [
        f"response.{each}" for each in (*OPENED, "failed")
    ], "also before its first token, where headers are out"


def test_log_probabilities_go_with_their_text_and_an_answer_may_end_by_a_filter() -> None:
    logprob = TokenLogprob(7, "a", -0.5, [])
    found = events(Begun(), SequenceOutput(0, "a", [logprob]))
    assert [each["logprobs"][0]["token"] for each in found if "logprobs" in each] == ["a", "a"]
    assert found[-1]["response"]["output"][0]["content"][0]["logprobs"][0]["logprob"] == -0.5
    filtered = SequenceOutcome("req_1.0", "req_1", "t", "stop", 5, 0, 5, 3, finish_word="content_filter")
    body = whole(Choice(0, ["a"], finish="stop", outcome=filtered))
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "content_filter"})
