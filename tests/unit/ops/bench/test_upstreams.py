"""How answers of other servers are compared, and what they are asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ops.bench.upstreams import recording, request_set
from ops.bench.upstreams.difference import RANDOM, differences, fields, joined
from ops.bench.upstreams.recording import RecordedRequest, Recording, ServerAnswer
from ops.bench.upstreams.servers import KINDS


def whole(message: dict[str, Any], finish: str = "stop", **more: Any) -> ServerAnswer:
    choice = {"index": 0, "message": {"role": "assistant"} | message, "finish_reason": finish}
    return ServerAnswer(200, json.dumps({"id": "x", "choices": [choice]} | more))


def stream(*events: dict[str, Any], done: bool = True, **more: Any) -> ServerAnswer:
    values = [{"id": "x", "choices": [{"index": 0} | event]} | more for event in events]
    lines = [f"data: {json.dumps(value)}\n\n" for value in values] + ["data: [DONE]\n\n"] * done
    return ServerAnswer(200, ": a comment\n\n" + "".join(lines), is_stream=True)


def named(direct: ServerAnswer, through: ServerAnswer, **more: Any) -> list[str]:
    return [each.field for each in differences(direct, through, **more)]


def test_equal_answers_differ_in_nothing_but_what_the_gateway_replaces_and_adds() -> None:
    direct = whole({"content": "yes"}, model="there", created=1, timings={"n": 1})
    through = whole({"content": "yes"}, model="here", created=2, id="y", fairgate={"outcome": "completed"})
    assert named(direct, through) == []


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"content": "no"}, "choices.0.message.content"),
        ({"content": "yes", "reasoning_content": "hm"}, "choices.0.message.reasoning_content"),
        ({"content": "yes", "annotations": [{"type": "x"}]}, "choices.0.message.annotations.0.type"),
    ],
)
def test_a_field_that_differs_is_named(changed: dict[str, Any], field: str) -> None:
    (found,) = differences(whole({"content": "yes"}), whole(changed))
    assert found.field == field
    assert named(whole(changed), whole({"content": "yes"})) == [field]
    assert named(whole(changed), whole({"content": "yes"}), varies=[field]) == []


def test_what_is_empty_is_absent() -> None:
    assert named(whole({"content": None, "tool_calls": []}), whole({"content": ""})) == []
    zero = {"usage": {"prompt_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}}
    assert named(whole({}, **zero), whole({}, usage={"prompt_tokens": 0})) == []
    assert named(whole({}, usage={"prompt_tokens": 0}), whole({}, usage={"prompt_tokens": 1})) == [
        "usage.prompt_tokens"
    ]


def test_a_stream_is_the_whole_answer_that_its_events_make() -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "add", "arguments": ""}}
    events = stream(
        {"delta": {"role": "assistant", "content": ""}},
        {"delta": {"reasoning": "so"}},
        {"delta": {"content": "ye"}, "logprobs": {"content": [{"token": "ye", "logprob": -1.0}]}},
        {"delta": {"content": "s"}, "logprobs": {"content": [{"token": "s", "logprob": -2.0}]}},
        {"delta": {"tool_calls": [call]}},
        {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}},
        {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}},
        {"delta": {}, "finish_reason": "tool_calls"},
    )
    found = fields(events)
    assert found["choices.0.message.content"] == "yes"
    assert found["choices.0.message.reasoning"] == "so"
    assert found["choices.0.message.tool_calls.0.function.arguments"] == '{"a":1}'
    assert found["choices.0.logprobs.content.1.logprob"] == -2.0
    assert found["choices.0.finish_reason"] == "tool_calls"
    other = ServerAnswer(200, events.body.replace('"id": "c"', '"id": "d"'), is_stream=True)
    assert named(events, other) == ["choices.0.message.tool_calls.0.id"]
    assert named(events, other, ignored=RANDOM) == []


def test_a_stream_without_an_end_is_no_answer() -> None:
    with pytest.raises(ValueError, match="no end"):
        joined(stream({"delta": {"content": "ye"}}, done=False).body)
    assert joined(stream({"delta": {}, "finish_reason": "stop"}, done=False).body)["choices"]


def test_of_a_refusal_only_the_status_is_compared() -> None:
    refused = ServerAnswer(400, '{"error": {"message": "the server\'s words"}}')
    assert named(refused, ServerAnswer(400, '{"error": {"message": "ours"}}')) == []
    assert named(refused, ServerAnswer(422, "{}")) == ["status"]
    assert named(whole({}), ServerAnswer(400, "{}")) == ["status"]


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    first = RecordedRequest("one", "/v1/chat/completions", {"max_tokens": 1}, whole({}), stream({}), ["id"])
    written = Recording(
        "s", "s-1", "2026-11-25", "m", 2048, [first, RecordedRequest("two", "/p", {}, whole({}))]
    )
    recording.save(written, tmp_path)
    assert recording.servers(tmp_path) == ["s"]
    assert recording.load("s", tmp_path) == written


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_server_knows_each_request_by_its_name_and_its_prompt(kind: Any) -> None:
    asked = kind.requests()
    prompts = [each.body.get("messages") or each.body.get("prompt") or each.body["input"] for each in asked]
    assert len({each.name for each in asked}) == len({json.dumps(each) for each in prompts}) == len(asked)


def test_pictures_differ() -> None:
    assert request_set.picture(1, 2, 3) != request_set.picture(3, 2, 1)
