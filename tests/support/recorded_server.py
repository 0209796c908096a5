"""A stand-in that replays other servers' recorded answers, byte for byte.

It knows a request by its path and its prompt, and keeps what arrived. What it does not know is answered with
one token: a gateway may try what it can do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ops.bench.upstreams.recording import RecordedRequest, Recording, ServerAnswer
from tests.support.faulty_servers import Peer, PeerRequest, in_thread

Change = Callable[[dict[str, Any]], dict[str, Any]]
"""What becomes of an answer, or of an event of one, before it is sent."""

OWNERS = {
    "vllm": "vllm", "vllm_defaults": "vllm", "vllm_images": "vllm", "llama_cpp": "llamacpp",
    "llama_cpp_embeddings": "llamacpp",
}  # fmt: skip
"""What the servers call themselves in their lists of models."""


class RecordedServer:
    """One server's recorded answers, and the requests that came for them."""

    def __init__(self, recording: Recording, change: Change | None = None) -> None:
        self.recording = recording
        self.arrived: dict[str, list[dict[str, Any]]] = {}
        """Bodies by the recorded request's name, in the order of their coming."""
        self._change = change
        self._known = {_prompt(each.path, each.body): each for each in recording.requests}
        assert len(self._known) == len(recording.requests), "two requests have the same prompt"

    async def answer(self, request: PeerRequest) -> None:
        """Handler of a `Peer`."""
        body = request.body or {}
        recorded = self._known.get(_prompt(request.path, body))
        if recorded is None:
            await request.json(_ONE_TOKEN)
            return
        self.arrived.setdefault(recorded.name, []).append(body)
        found = recorded.stream if body.get("stream") else recorded.whole
        if found is None:  # a refusal is the same either way
            found = recorded.whole
        await _send(request, found, self._change)


@contextmanager
def recorded_server(
    recording: Recording, change: Change | None = None
) -> Iterator[tuple[str, RecordedServer]]:
    """The server's URL and its record of what came."""
    server = RecordedServer(recording, change)
    owner = OWNERS.get(recording.server, "x")
    peer = Peer(server.answer, (recording.model,), recording.context_tokens, owner)
    with in_thread(peer):
        yield peer.url, server


def named(recording: Recording, name: str) -> RecordedRequest:
    """One request of a recording."""
    return next(each for each in recording.requests if each.name == name)


_ONE_TOKEN = {
    "object": "chat.completion",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "1"}, "text": "1", "finish_reason": "length"}
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


def _prompt(path: str, body: dict[str, Any]) -> tuple[str, str]:
    """What a request is known by."""
    prompt = body.get("messages") or body.get("prompt") or body.get("input")
    return path, json.dumps(plain(prompt), sort_keys=True)


def plain(value: Any) -> Any:
    """A value of a request, written in the shortest of the forms that mean the same: without fields that are
    null, a list of one text as the text."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items() if each is not None}
    if not isinstance(value, list):
        return value
    found = [plain(each) for each in value]
    match found:
        case [str(text)] | [{"type": "text", "text": str(text)}]:
            return text
    return found


async def _send(request: PeerRequest, answer: ServerAnswer, change: Change | None) -> None:
    if not answer.is_stream:
        content = answer.body
        if change is not None and answer.status == 200:
            content = json.dumps(change(json.loads(content)))
        payload = content.encode()
        await request.send(
            f"HTTP/1.1 {answer.status} x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(payload)}\r\n\r\n".encode(),
            payload,
        )
        return
    await request.head(answer.status)
    for event in answer.body.split("\n\n"):
        data = event.removeprefix("data: ")
        if data and change is not None and data != "[DONE]":
            data = json.dumps(change(json.loads(data)))
        if data:
            await request.events(data)
    await request.last()
