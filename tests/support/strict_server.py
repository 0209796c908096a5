"""A stand-in that refuses what is no field of vLLM's API, says what it was sent and answers by rule.

Its answer has two tokens, with tools a call, and beside it what vLLM adds: an echoed prompt with its log
probabilities, and ids and log probabilities where they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.faulty_servers import Peer, PeerRequest, in_thread

MODEL = "strict"
FIELDS = frozenset(
    {
        "model", "messages", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
        "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs",
        "top_logprobs", "stream", "stream_options", "cache_salt", "tools", "tool_choice", "echo", "suffix",
        "parallel_tool_calls", "response_format", "reasoning_effort", "reasoning", "thinking",
        "enable_thinking", "skip_special_tokens", "add_generation_prompt", "include_reasoning",
        "continue_final_message", "return_token_ids", "prompt_logprobs",
    }
)  # fmt: skip
OF_MESSAGES = frozenset(
    {
        "role", "content", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "refusal",
        "annotations",
    }
)  # fmt: skip
PARTS = ("text", "image_url", "input_audio", "audio_url", "video_url", "file")
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
CALL_ID = "s" * 4096
ABOUT_PROMPT = {
    "prompt_token_ids": [1, 2, 3],
    "prompt_logprobs": [None, {"5": {"logprob": -1.5, "rank": 1, "decoded_token": "a"}}],
}


@contextmanager
def strict_server() -> Iterator[Peer]:
    """One that is up; `requests` has what came."""
    with in_thread(Peer(_answer, (MODEL,), 65_536, "vllm")) as peer:
        yield peer


def unknown_in(body: dict[str, Any]) -> set[str]:
    """What of a request is no field of its API."""
    found = body.keys() - FIELDS
    for message in body.get("messages", ()):
        found |= message.keys() - OF_MESSAGES
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            found |= part.keys() - {"type", part["type"] if part["type"] in PARTS else ""}
    for tool in body.get("tools", ()):
        found |= tool.keys() - {"type", "function"}
    return set(found)


async def _answer(request: PeerRequest) -> None:
    body = request.body
    if found := unknown_in(body):
        return await request.json({"error": {"message": f"unknown: {sorted(found)}"}}, 400)
    is_chat = "messages" in body
    about = {
        name: value
        for name, value in ABOUT_PROMPT.items()
        if body.get("return_token_ids" if name == "prompt_token_ids" else name)
    }
    pieces = list(_pieces(body, is_chat))
    if not body.get("stream"):
        whole = _joined(pieces) | ({} if is_chat else about)
        return await request.json({"choices": [whole], "usage": USAGE} | (about if is_chat else {}))
    await request.head()
    for number, piece in enumerate(pieces):
        first = about if number == 0 else {}
        choice = piece | ({} if is_chat else first)
        await request.events({"choices": [choice]} | (first if is_chat else {}))
    await request.events({"choices": [], "usage": USAGE}, "[DONE]")
    return await request.last()


def _pieces(body: dict[str, Any], is_chat: bool) -> Iterator[dict[str, Any]]:
    """The choices of a stream's events."""
    if not is_chat:
        prompt = body["prompt"] if body.get("echo") and isinstance(body["prompt"], str) else ""
        for number, text in enumerate((prompt + "one ", "two")):
            choice = {"index": 0, "text": text, "finish_reason": "length" if number else None}
            if body.get("logprobs") is not None:
                count = 4 if number == 0 and body.get("echo") else 1
                values = [None if count > 1 else -1.0, *[-1.0] * (count - 1)]
                tops = [None if each is None else {text: each} for each in values]
                names = {"tokens": [text] * count, "token_logprobs": values, "top_logprobs": tops}
                choice["logprobs"] = names
            yield choice | ({"token_ids": [8 + number]} if body.get("return_token_ids") else {})
        return
    deltas: list[dict[str, Any]] = [{"content": "one "}, {"content": "two"}]
    if body.get("tools") and body.get("tool_choice") != "none":
        function = {"name": "add", "arguments": '{"a":"one"}'}
        deltas = [{"tool_calls": [{"index": 0, "id": CALL_ID, "type": "function", "function": function}]}]
    for number, delta in enumerate(deltas):
        choice = {"index": 0, "delta": {"role": "assistant"} | delta, "finish_reason": None}
        if number == len(deltas) - 1:
            choice["finish_reason"] = "tool_calls" if "tool_calls" in delta else "length"
        yield choice | ({"token_ids": [8 + number]} if body.get("return_token_ids") else {})


def _joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice of a whole answer."""
    whole: dict[str, Any] = {}
    for piece in pieces:
        for name, value in piece.items():
            if name == "delta":
                message = whole.setdefault("message", {})
                content = message.get("content", "") + value["content"] if "content" in value else None
                message |= value | {"content": content}
                for call in message.get("tool_calls", ()):
                    call.pop("index", None)
            elif name in ("text", "token_ids"):
                whole[name] = whole[name] + value if name in whole else value
            elif name == "logprobs":
                before = whole.get(name) or {each: [] for each in value}
                whole[name] = {each: before[each] + value[each] for each in value}
            else:
                whole[name] = value
    return whole
