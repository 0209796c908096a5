"""The short way of a completion equals the framework's.

`/v1/chat/completions/` is the same route in another spelling, which only the framework knows: what it answers
there is what the short way has to answer.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from gateway.app import HANDLERS
from gateway.http.fast_route import Application
from tests.support.server_process import MODEL, Server

CHAT = {"model": MODEL, "max_tokens": 3, "temperature": 0, "messages": [{"role": "user", "content": "Hello"}]}
TEXT = {"model": MODEL, "max_tokens": 3, "temperature": 0, "prompt": "Hello"}
VARYING = {
    "id",
    "created",
    "request_id",
    "estimate",
    "actual",
    "cached_tokens",
    "scheduling",
    "displaced",
} | {
    "tokens",
    "cost_nanousd",
}
"""What differs from one request to the next: times, and what was learned and cached meanwhile."""
OF_ONE_REQUEST = ("x-request-id", "openai-processing-ms", "date", "ratelimit", "content-length")


@pytest.fixture(scope="module")
def keys(server: Server) -> dict[str, str]:
    """A key that may, and one that may not."""
    key = server.tenant("straight")
    made = server.admin("POST", "/keys", {"tenant": "straight", "scopes": ["quote"]})
    return {"good": key, "no scope": made["key"], "unknown": "fg_live_0000000000000000_0000"}


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "a chat": ("good", {"json": CHAT}),
    "a stream": ("good", {"json": CHAT | {"stream": True}}),
    "a field that is unknown": ("good", {"json": CHAT | {"nonsense": 1}}),
    "a model that is unknown": ("good", {"json": CHAT | {"model": "none"}}),
    "no JSON": ("good", {"content": b"{", "headers": {"content-type": "application/json"}}),
    "another type": ("good", {"content": b"x", "headers": {"content-type": "text/plain"}}),
    "an idempotency key that cannot be": ("good", {"json": CHAT, "headers": {"idempotency-key": "x" * 999}}),
    "a key without the scope": ("no scope", {"json": CHAT}),
    "an unknown key": ("unknown", {"json": CHAT}),
    "no key": ("", {"json": CHAT}),
}


@pytest.mark.parametrize("asked", ASKED)
def test_both_ways_answer_alike(server: Server, keys: dict[str, str], asked: str) -> None:
    whose, request = ASKED[asked]
    short, plain = (
        answer_of(server, f"/v1/chat/completions{ending}", keys.get(whose), request) for ending in ("", "/")
    )
    assert short == plain


def test_text_completions_go_the_same_two_ways(server: Server, keys: dict[str, str]) -> None:
    short, plain = (
        answer_of(server, f"/v1/completions{ending}", keys["good"], {"json": TEXT}) for ending in ("", "/")
    )
    assert short == plain
    assert short[0] == 200


@pytest.mark.parametrize("method", ["GET", "DELETE", "OPTIONS"])
def test_another_method_is_the_frameworks(server: Server, method: str) -> None:
    short, plain = (
        httpx.request(method, f"{server.url}/v1/chat/completions{ending}", timeout=60).status_code
        for ending in ("", "/")
    )
    assert short == plain != 200 or method == "OPTIONS"


def test_the_routes_that_stream_and_no_others_go_straight() -> None:
    async def refuse(*_: Any) -> None: ...

    app = Application(refuse=refuse, route_handlers=HANDLERS, openapi_config=None)
    assert set(app._straight) == {"/v1/chat/completions", "/v1/completions"}


def answer_of(
    server: Server, path: str, key: str | None, request: dict[str, Any]
) -> tuple[int, Any, dict[str, str]]:
    """Status, body and headers, without what no two requests share."""
    headers = dict(request.get("headers", {}))
    if key:
        headers["authorization"] = f"Bearer {key}"
    answer = httpx.post(server.url + path, timeout=60, **(request | {"headers": headers}))
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.headers["openai-processing-ms"].isdigit()
    shown = {
        name: value
        for name, value in answer.headers.items()
        if name not in OF_ONE_REQUEST and not name.startswith(("x-fairgate-estimate", "x-ratelimit"))
    }
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        return answer.status_code, [lines[-1], *map(_steady, map(json.loads, lines[:-1]))], shown
    return answer.status_code, _steady(answer.json()), shown


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _steady(each) for name, each in value.items() if name not in VARYING}
    return [_steady(each) for each in value] if isinstance(value, list) else value
