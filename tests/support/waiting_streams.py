"""Streams that fill a server whose engine runs one sequence at a time, and streams that wait behind them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.support.server_process import MODEL, Server, until

LOOKAHEAD = 2
"""Sequences that are dispatched beyond what the engine runs at once."""
ENDLESS = {"model": MODEL, "prompt": "on and on", "max_tokens": 8000, "ignore_eos": True, "stream": True}
SHORT = {"model": MODEL, "prompt": "short", "max_tokens": 4, "ignore_eos": True}


@contextmanager
def full(server: Server, key: str) -> Iterator[list[str]]:
    """The engine and its window are full of interactive streams; gives their request ids. They end here."""
    with ExitStack() as stack:
        client = stack.enter_context(server.http(key))
        for _ in range(1 + LOOKAHEAD):
            # Headers come at once with progress, whether it has its turn or waits for it in the engine.
            answer = stack.enter_context(
                client.stream("POST", "/v1/completions", json=ENDLESS, headers={"x-fairgate-progress": "1"})
            )
            assert answer.status_code == 200, answer.read()

        def listed() -> list[str]:
            return [each["id"] for each in client.get("/v1/requests").json()["data"]]

        until(lambda: len(listed()) == 1 + LOOKAHEAD)
        yield listed()
        with server.http(key) as other:
            for each in other.get("/v1/requests").json()["data"]:
                other.delete(f"/v1/requests/{each['id']}")
    until(server.is_idle)


@contextmanager
def waiting(server: Server, key: str, **fields: Any) -> Iterator[tuple[str, Iterator[str]]]:
    """A stream that stands in line: its id, and its lines as they come."""
    body = SHORT | {"stream": True} | fields
    with (
        server.http(key) as client,
        client.stream("POST", "/v1/completions", json=body, headers={"x-fairgate-progress": "1"}) as response,
    ):
        assert response.status_code == 200
        yield response.headers["x-request-id"], response.iter_lines()


def events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """(`comment`, `data`, `error` or `done`, what it says), blank lines apart."""
    kind = "data"
    for line in lines:
        if line.startswith(": fairgate "):
            yield "comment", json.loads(line.removeprefix(": fairgate "))
        elif line == "event: error":
            kind = "error"
        elif line == "data: [DONE]":
            yield "done", None
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))
