"""Sends the demo's requests as streams and records what each client sees: times, usage and account."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 300.0
TOLD_WAIT = re.compile(r"wait;p50=([0-9.]+);p90=([0-9.]+)")
TAIL_BYTES = 64 * 1024
"""The end of a stream that is kept to read usage and account from."""


@dataclass(frozen=True)
class PlannedRequest:
    send_s: float
    tenant: str
    tier: str
    key: str
    body: dict[str, Any]
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass
class Sent:
    """One request as its client saw it. Times are seconds on the replay's clock."""

    tenant: str
    tier: str
    sent_s: float
    planned: PlannedRequest | None = None
    status: int = 0
    first_token_s: float | None = None
    ended_s: float | None = None
    chunks: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    refusal: str | None = None
    """Error code of a refusal, or `connection` where the transport failed."""
    account: dict[str, Any] = field(default_factory=dict)
    """The `fairgate` object of the last chunk: estimates and actuals."""
    told_wait_s: dict[str, float] | None = None
    """p50 and p90 in the answer's headers."""
    cut_s: float | None = None

    @property
    def ok(self) -> bool:
        return self.refusal is None and self.ended_s is not None

    @property
    def cut_wait_s(self) -> float | None:
        """Least wait of a request that was cut before its first token."""
        return None if self.cut_s is None or self.first_token_s is not None else self.cut_s - self.sent_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def e2e_s(self) -> float | None:
        return self.ended_s - self.sent_s if self.ok and self.ended_s is not None else None


@dataclass
class Board:
    sent: list[Sent] = field(default_factory=list)
    planned: int = 0
    started_s: float = field(default_factory=time.monotonic)

    def now_s(self) -> float:
        return time.monotonic() - self.started_s

    def by_tenant(self) -> Mapping[str, list[Sent]]:
        by_tenant: dict[str, list[Sent]] = defaultdict(list)
        for item in self.sent:
            by_tenant[item.tenant].append(item)
        return by_tenant


async def replay(url: str, requests: Sequence[PlannedRequest], board: Board) -> None:
    """Sends every request at its time and waits for all answers. Never raises for a single failure."""
    board.planned = len(requests)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    timeout = httpx.Timeout(TIMEOUT_S, connect=30.0)
    async with (
        httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout) as client,
        asyncio.TaskGroup() as group,
    ):
        for request in sorted(requests, key=lambda request: request.send_s):
            delay_s = request.send_s - board.now_s()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            group.create_task(_send(client, request, board))


async def _send(client: httpx.AsyncClient, request: PlannedRequest, board: Board) -> None:
    sent = Sent(request.tenant, request.tier, board.now_s(), request)
    board.sent.append(sent)
    body = request.body | {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"authorization": f"Bearer {request.key}"}
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            sent.status = response.status_code
            if response.status_code != 200:
                sent.refusal = _error_code(await response.aread())
                return
            told = TOLD_WAIT.match(response.headers.get("x-fairgate-estimate", ""))
            sent.told_wait_s = {"p50": float(told[1]), "p90": float(told[2])} if told else None
            tail = b""
            async for chunk in response.aiter_raw():
                if sent.first_token_s is None and b'"delta"' in chunk:
                    sent.first_token_s = board.now_s()
                sent.chunks += chunk.count(b"data:")
                tail = (tail + chunk)[-TAIL_BYTES:]
            _read_tail(tail, sent)
            sent.ended_s = board.now_s()
    except httpx.HTTPError:
        sent.refusal = "connection"
    finally:
        sent.cut_s = None if sent.ok else board.now_s()


def _error_code(content: bytes) -> str:
    try:
        error = json.loads(content)["error"]
        return str(error.get("code") or error.get("type"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "unreadable"


def _read_tail(tail: bytes, sent: Sent) -> None:
    """Usage and account are in the last chunks, or an error event in their place."""
    for line in tail.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        try:
            event = json.loads(line[6:])
        except ValueError:  # the kept tail may begin inside a line
            continue
        if "error" in event:
            sent.refusal = str(event["error"].get("code") or "stream_error")
        for choice in event.get("choices", []):
            sent.finish_reason = choice.get("finish_reason") or sent.finish_reason
        usage = event.get("usage")
        if usage:
            sent.prompt_tokens = usage["prompt_tokens"]
            sent.completion_tokens = usage["completion_tokens"]
        if event.get("fairgate"):
            sent.account = event["fairgate"]
