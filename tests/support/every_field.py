"""Requests with every field and kind of part that a client may send, for a server that takes everything."""

from __future__ import annotations

import base64
from typing import Any

from ops.bench.upstreams.request_set import (
    CALL,
    HINT,
    HISTORY,
    RequestSet,
    SetRequest,
    beside_text,
    completions,
    logprobs,
    penalties,
    picture,
    sampling,
    says,
    schemas,
    tool,
    tools,
)


def every_field() -> list[SetRequest]:
    """Of a server that takes everything: what all know, and each field and kind of part beside that."""
    found = RequestSet()
    for add in (sampling, penalties, logprobs, tools, schemas, completions, beside_text):
        add(found)
    idle: dict[str, Any] = {
        "reasoning_effort": "none", "skip_special_tokens": True, "add_generation_prompt": True,
        "include_reasoning": True, "continue_final_message": False, "enable_thinking": False,
    }  # fmt: skip
    for fields in (
        {}, idle, {"temperature": None, "max_tokens": None}, {"reasoning_effort": "low"},
        {"reasoning": {"effort": "high"}}, {"reasoning": {"effort": "high", "exclude": True}},
        {"thinking": {"type": "enabled"}}, {"enable_thinking": True}, {"user": {"id": "ann"}},
        {"user": "ann", "safety_identifier": "a", "metadata": {"a": "b"}, "store": True},
        {"prompt_cache_key": "x", "prompt_cache_retention": "24h"} | HINT,
        CALL | {"tools": [tool() | HINT]}, {"max_tokens": None, "max_completion_tokens": 5},
    ):  # fmt: skip
        found.chat(f"fields {', '.join(fields)}", **fields)
    found.text("text that is filled in", suffix="the end")
    sound = base64.b64encode(b"RIFF").decode()
    media = {
        "input_audio": {"data": sound, "format": "wav"},
        "audio_url": {"url": f"data:audio/wav;base64,{sound}"},
        "video_url": {"url": f"data:video/mp4;base64,{sound}"},
        "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{sound}"},
    }
    parts = [picture(1, 2, 3) | {"uuid": "x"}, *({"type": name, name: each} for name, each in media.items())]
    for part in parts:
        asked = {"type": "text", "text": "What is it?"} | HINT
        found.chat(part["type"], [{"role": "user", "content": [asked, part]} | HINT])
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    echoes = {"reasoning_details": [{"type": "x"}], "prefix": False, "refusal": "no", "annotations": [{}]}
    answer = [thought, {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "So."}]
    answer.append({"type": "refusal", "refusal": "no"})
    said = {"role": "assistant", "content": answer, "reasoning": "hm"} | echoes
    found.chat("an answer sent back", [*says("Well?"), said, *says("And?")])
    long = "i" * 4096
    call = HISTORY[1]["tool_calls"][0] | {"id": long}
    called = [HISTORY[0], HISTORY[1] | {"tool_calls": [call]}, HISTORY[2] | {"tool_call_id": long}]
    found.chat("a signature as a call's id", called)
    return found.asked
