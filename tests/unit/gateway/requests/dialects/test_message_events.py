"""Events of a streamed message, in their order; joined they are the whole message."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from engine.messages import SamplingParams
from gateway import errors
from gateway.domain.account import Account
from gateway.domain.call import Call
from gateway.domain.estimate import Times
from gateway.requests.dialects.dialect import Choice
from gateway.requests.dialects.message_events import MessageWriter, whole_message
from gateway.requests.dialects.translation import LeftOut
from gateway.requests.run import Begun, Closed, Event, SequenceEnded, SequenceOutput, Silence
from gateway.upstream.base import CountedOutcome
from tenants.types import Amounts, Tier
from tests.support.builders import principal

CALL = Call("req_1", True, "m", principal(), Tier.BATCH, ([1] * 9,), 1, 9, SamplingParams(), True, False, 1)
LEFT_OUT = [LeftOut("tools[0]", "Not here.")]
CHARGED = Amounts(input_tokens=9, output_tokens=5)
ACCOUNT = Account("req_1", "acme", "batch", "completed", None, None, Times(0.0), CHARGED, CHARGED, 4, 0)


def call(index: int, said: str, name: str = "") -> dict[str, Any]:
    function = {"arguments": said} | ({"name": name} if name else {})
    return {"tool_calls": [{"index": index, "function": function} | ({"id": f"c{index}"} if name else {})]}


def ended(finish: str = "stop", word: str = "", **fields: Any) -> SequenceEnded:
    outcome = CountedOutcome("s", "r", "t", finish, 9, 4, 5, 5, finish_word=word, choice_fields=fields)
    return SequenceEnded(0, finish, outcome)


def events(said: Sequence[Any], end: SequenceEnded | None = None, **closed: Any) -> list[dict[str, Any]]:
    """Of an answer: texts, and parts of a chat's answer."""
    run: list[Event] = [Begun(), *map(_output, said), end or ended()]
    writer = MessageWriter(CALL, LEFT_OUT)
    written = b"".join([*map(writer.write, run), writer.write(Closed(ACCOUNT, None), **closed)])
    found = []
    for event in written.decode().strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def _output(said: Any) -> SequenceOutput:
    return SequenceOutput(0, said, ()) if isinstance(said, str) else SequenceOutput(0, "", (), (said,))


def shown(found: Sequence[dict[str, Any]]) -> list[str]:
    """Blocks and deltas in short."""
    short: list[str] = []
    for event in found:
        index = event.get("index", "")
        if block := event.get("content_block"):
            short.append(f"{index} {block['type']}" + (f" {block['name']}" if "name" in block else ""))
        elif event["type"] == "content_block_delta":
            short.append(f"{index} {event['delta'].popitem()[1]}")
        elif event["type"] == "content_block_stop":
            short.append(f"{index} stop")
    return short


def test_blocks_follow_each_other_between_the_frame_of_a_message() -> None:
    found = events([{"reasoning_content": "Hm"}, "Hel", 'lo "\u2028', call(0, "", "add"), call(0, '{"a":1}')])
    frame = [found[position]["type"] for position in (0, -2, -1)]
    assert frame == ["message_start", "message_delta", "message_stop"]
    assert shown(found) == [
        *("0 thinking", "0 Hm", "0 stop"),
        *("1 text", "1 Hel", '1 lo "\u2028', "1 stop"),
        *("2 tool_use add", '2 {"a":1}', "2 stop"),
    ]
    start, end = found[0]["message"], found[-2]
    assert (start["id"], start["content"], start["usage"]["input_tokens"]) == ("msg_1", [], 9)
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    usage = {name: value for name, value in end["usage"].items() if value}
    assert usage == {
        "input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 5, "service_tier": "batch"
    }  # fmt: skip
    assert end["fairgate"]["left_out"] == [{"param": "tools[0]", "why": "Not here."}]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            [call(0, "{}", "a"), call(1, "{", "b"), call(1, "}"), call(0, " "), "end"],
            ["0 a", "0 {}", "0 stop", "1 b", "1 {", "1 }", "1 stop", "2 text", "2 end", "2 stop"],
        ),
        (
            [call(0, "{", "a"), call(1, "{", "b"), "end", call(0, "}"), call(1, "}"), call(2, "{}", "c")],
            [
                *("0 a", "0 {", "0 }", "0 stop", "1 text", "1 end", "1 stop"),
                *("2 b", "2 {}", "2 stop", "3 c", "3 {}", "3 stop"),
            ],
        ),
    ],
    ids=["one after the other: each as it comes", "interleaved: held back"],
)
def test_calls_follow_each_other(said: list[Any], expected: list[str]) -> None:
    assert [each.replace("tool_use ", "") for each in shown(events(said))] == expected


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (ended(), "end_turn", None),
        (ended("length"), "max_tokens", None),
        (ended("budget"), "max_tokens", None),
        (ended(stop_reason="END"), "stop_sequence", "END"),
        (ended(matched_stop="END"), "stop_sequence", "END"),
        (ended(stop_reason=7), "end_turn", None),
        (ended(word="content_filter"), "refusal", None),
    ],
)
def test_the_end_is_said_in_anthropics_words(end: SequenceEnded, reason: str, sequence: str | None) -> None:
    said = {"stop_reason": reason, "stop_sequence": sequence}
    assert events(["a"], end)[-2]["delta"] == said
    choice = Choice(0, ["a"], finish=end.finish, outcome=end.outcome)
    assert whole_message(CALL, choice, ACCOUNT, []).items() >= said.items()


def test_a_whole_message_has_the_blocks_of_the_stream() -> None:
    parts = [{"reasoning": "Hm"}, call(0, '{"a":', "add"), call(0, "1}"), call(1, '{"a":' * 9999, "add")]
    found = whole_message(CALL, Choice(0, ["Hello"], parts=parts), ACCOUNT, LEFT_OUT)
    assert found["content"] == [
        {"type": "thinking", "thinking": "Hm", "signature": ""},
        {"type": "text", "text": "Hello"},
        {"type": "tool_use", "id": "c0", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {}},
    ]
    streamed = events([parts[0], "Hello", *parts[1:]])
    assert [event["content_block"]["type"] for event in streamed if "content_block" in event] == [
        block["type"] for block in found["content"]
    ]
    end = streamed[-2]
    assert (found["usage"], found["fairgate"]) == (end["usage"], end["fairgate"])


def test_an_answer_that_breaks_off_ends_with_an_error_and_a_silence_is_a_ping() -> None:
    assert MessageWriter(CALL, []).write(Silence()) == b'event: ping\ndata: {"type":"ping"}\n\n'
    last = events(["a"], refusal=errors.engine_unavailable())[-1]
    assert (last["type"], last["error"]["type"], last["request_id"]) == ("error", "overloaded_error", "req_1")
    assert last["fairgate"]["tokens"]
