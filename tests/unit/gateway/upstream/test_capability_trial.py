"""Trials of capabilities: what they ask for, and what answers mean."""

from __future__ import annotations

import base64
import io
import json
import wave
import zlib

import pytest

from engine.messages import SamplingParams, Submit
from gateway.upstream.base import Wording
from gateway.upstream.capabilities import Capabilities, Capability
from gateway.upstream.openai.capability_trial import (
    TrialResult,
    result_of,
    silence,
    text_trials,
    trials,
    vector_trials,
    white_image,
)
from gateway.upstream.openai.request import PriorityStyle, UsageWish, body, fields_for
from gateway.upstream.openai.server_kinds import ServerKind, kind_of_owner

REFUSED = b'{"error": {"message": "tools param requires --jinja flag"}}'


@pytest.mark.parametrize(
    ("status", "answer", "result"),
    [
        (200, b'{"choices": []}', TrialResult.CAN),
        (200, b'{"error": {"message": "no"}}', TrialResult.CANNOT),
        (200, b"<html>", TrialResult.UNKNOWN),
        *((status, REFUSED, TrialResult.CANNOT) for status in (400, 404, 405, 413, 415, 422, 501)),
        (500, REFUSED, TrialResult.FAILED),
        *((status, REFUSED, TrialResult.UNKNOWN) for status in (401, 403, 429, 502, 503, 504, 302)),
    ],
)
def test_an_answer_says_whether_the_server_can(status: int, answer: bytes, result: TrialResult) -> None:
    assert result_of(status, answer)[0] is result


def test_a_reason_is_one_bounded_line() -> None:
    _, reason = result_of(400, json.dumps({"error": {"message": "a\n\x1b[31m" * 10_000}}).encode())
    assert len(reason) < 400
    assert reason.isprintable()


def test_each_word_has_one_trial_of_one_token() -> None:
    found = [*text_trials("m")[:1], *trials("m", ServerKind.VLLM, is_chat=True), *vector_trials("m")]
    assert sorted(each.word for each in found) == sorted(Capability)
    for each in found:
        asked = json.loads(each.body)
        assert asked["model"] == "m"
        assert asked.get("max_tokens", 1) == 1
        assert len(each.body) < 2_000
    assert "extra_fields" not in [each.word for each in trials("m", ServerKind.OTHER, is_chat=True)]
    of_text = trials("m", ServerKind.VLLM, is_chat=False)
    assert {each.word for each in of_text} == {"json_object", "json_schema", "extra_fields"}


def test_the_image_is_a_png_of_white() -> None:
    data = base64.b64decode(white_image(56).partition(",")[2])
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    begin = data.index(b"IDAT") + 4
    rows = zlib.decompress(data[begin : data.index(b"IEND") - 8])
    assert rows == (b"\0" + b"\xff" * 168) * 56


def test_the_sound_is_a_wav_of_silence() -> None:
    with wave.open(io.BytesIO(base64.b64decode(silence(300)))) as found:
        assert (found.getnchannels(), found.getsampwidth(), found.getframerate()) == (1, 1, 8000)
        assert found.readframes(301) == b"\x80" * 300


@pytest.mark.parametrize(
    ("owner", "kind"),
    [
        ("vllm", "vllm"), ("sglang", "sglang"), ("llamacpp", "llama.cpp"), ("fairgate", "other"),
        (None, "other"),
    ],
)  # fmt: skip
def test_a_server_names_its_kind_in_its_list_of_models(owner: str | None, kind: str) -> None:
    assert kind_of_owner(owner) == kind


def test_tools_that_may_not_be_called_are_left_out_where_a_server_takes_none() -> None:
    fields = {"tools": [{}], "tool_choice": "none", "parallel_tool_calls": True, "min_tokens": 30}
    plain, able = Capabilities(frozenset({"text"})), Capabilities(frozenset({"text", "tools"}))
    assert fields_for(fields, plain, max_tokens=10) == {"min_tokens": 10}
    assert fields_for(fields, able, max_tokens=40) == fields
    assert fields["min_tokens"] == 30, "the request's own stay as they are"


def test_what_the_gateway_decides_goes_before_the_clients_fields() -> None:
    submit = Submit("s", "r", "t", [1], 10, 10, SamplingParams(temperature=0.5))
    wording = Wording(
        [], fields={"max_tokens": 999, "model": "x", "stream": False, "cache_salt": "x", "tools": [1]}
    )
    sent = json.loads(
        body(
            submit, wording, model="m", max_tokens=7, priority=PriorityStyle.VLLM, usage=UsageWish.END,
            stream=True, cache_salt="salt",
        )
    )  # fmt: skip
    assert (sent["max_tokens"], sent["model"], sent["stream"]) == (7, "m", True)
    assert (sent["cache_salt"], sent["tools"]) == ("salt", [1])
