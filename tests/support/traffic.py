"""Clients in threads that send one completion after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from tests.support.server_process import MODEL, Server


@dataclass(frozen=True)
class Sender:
    key: str
    connections: int = 1
    pause_s: float = 0.0
    """Between an answer and the next request."""
    max_tokens: int = 12
    tier: str | None = None
    prompt: str = "again"
    timeout_s: float = 120.0
    stream: bool = False


@contextmanager
def traffic(server: Server, senders: Sequence[Sender]) -> Iterator[None]:
    """Sends until the block ends; the answers that are under way then are awaited."""
    over = threading.Event()

    def send(sender: Sender) -> None:
        body = {"model": MODEL, "prompt": sender.prompt, "max_tokens": sender.max_tokens, "ignore_eos": True}
        body["stream"] = sender.stream
        if sender.tier:
            body["service_tier"] = sender.tier
        with server.http(sender.key, timeout_s=sender.timeout_s) as client:
            while not over.wait(sender.pause_s):
                try:
                    client.post("/v1/completions", json=body)
                except httpx.HTTPError:
                    return

    threads = [
        threading.Thread(target=send, args=(sender,), daemon=True)
        for sender in senders
        for _ in range(sender.connections)
    ]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        over.set()
        for each in threads:
            each.join(120)
