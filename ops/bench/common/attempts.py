"""Clients of the budget benchmark, which retry as OpenAI's SDK does.

A refused request is sent again after `retry-after` unless `x-should-retry: false`; a broken stream is not.
Streamed tokens are counted from their log probabilities, not from the usage that the server states.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ops.bench.common.http_client import HttpBroken, HttpResponse, LoadHttpClient

TIMEOUT_S = 45.0
LONGEST_WAIT_S = 2.0
"""Most that a client waits before it asks again: a scenario has a minute."""
DEFAULT_WAIT_S = 0.25
SAYS_TOKENS = ("engine_lost", "tenant_suspended")
"""Errors that end a stream early and whose messages state the charged tokens."""
RETRIED = (408, 409, 429)
"""As the SDK does, beside 5xx and broken connections."""


@dataclass(slots=True)
class ClientAttempt:
    tenant_id: str
    status: int = 0
    """0: the connection broke before there was one."""
    request_id: str = ""
    code: str = ""
    delivered_tokens: int = 0
    is_whole: bool = False
    """Everything arrived, up to the regular end."""
    has_left: bool = False
    is_replay: bool = False
    idempotency_key: str = ""
    finish: str = ""
    text: str = ""
    prompt_tokens: int = 0
    usage_tokens: int | None = None
    """Output tokens that the server states: in the usage, or in the error that ended the stream."""
    retry_after_s: float | None = None
    may_retry: bool = True
    token_times_s: list[float] = field(default_factory=list)
    attempt: int = 0
    """How often its client had asked before."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    tenant_id: str
    key: str
    body: Mapping[str, Any]
    leave_after_tokens: int | None = None
    leave_after_s: float | None = None
    idempotency_key: str = ""


class StreamsUnderWay:
    """Waits until a number of streams have had a number of tokens: the moment for a kill or an act."""

    def __init__(self, streams: int = 1, tokens: int = 1) -> None:
        self._streams = streams
        self._tokens = tokens
        self._far_enough: set[int] = set()
        self._is_time = asyncio.Event()

    def on_token(self, answer: ClientAttempt) -> None:
        if answer.delivered_tokens >= self._tokens:
            self._far_enough.add(id(answer))
        if len(self._far_enough) >= self._streams:
            self._is_time.set()

    async def wait(self, timeout_s: float) -> None:
        """Raises `TimeoutError`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_time.wait()
        except TimeoutError:
            raise TimeoutError(f"the streams did not get far enough within {timeout_s:g} s") from None


async def ask_once(
    client: LoadHttpClient,
    url: str,
    ask: ClientRequest,
    on_token: Callable[[ClientAttempt], None] | None = None,
    on_chunk: Callable[[dict[str, Any]], None] | None = None,
) -> ClientAttempt:
    """One attempt; never raises for a server's failure. `on_token` is called at each delivery, `on_chunk`
    with each event of a stream."""
    answer = ClientAttempt(ask.tenant_id, idempotency_key=ask.idempotency_key)
    headers = {"authorization": f"Bearer {ask.key}"}
    if ask.idempotency_key:
        headers["idempotency-key"] = ask.idempotency_key
    body = dict(ask.body)
    if body.get("stream"):
        body = {"logprobs": True, "stream_options": {"include_usage": True}} | body
    try:
        async with (
            asyncio.timeout(ask.leave_after_s),
            client.post(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers) as reply,
        ):
            _read_head(answer, reply)
            if reply.status != 200 or not body.get("stream"):
                _read_whole(answer, await reply.read())
            else:
                async for line in reply.lines():
                    if on_chunk is not None and line.startswith("data: {"):
                        on_chunk(json.loads(line.removeprefix("data: ")))
                    if take_line(answer, line, time.monotonic()) and on_token is not None:
                        on_token(answer)
                    if answer.delivered_tokens >= (ask.leave_after_tokens or math.inf):
                        answer.has_left = True
                        break
    except TimeoutError:
        answer.has_left = True
    except HttpBroken:
        answer.is_whole = False
    return answer


def _read_head(answer: ClientAttempt, reply: HttpResponse) -> None:
    answer.status = reply.status
    answer.request_id = reply.headers.get("x-request-id", "")
    answer.is_replay = reply.headers.get("x-fairgate-idempotent-replay") == "true"
    answer.may_retry = reply.headers.get("x-should-retry") != "false"
    with contextlib.suppress(ValueError):
        after_ms, after_s = reply.headers.get("retry-after-ms"), reply.headers.get("retry-after")
        if after_ms or after_s:
            answer.retry_after_s = float(after_ms) / 1000 if after_ms else float(after_s or 0)


def _read_whole(answer: ClientAttempt, content: bytes) -> None:
    try:
        body = json.loads(content)
    except ValueError:
        return
    answer.is_whole = True
    if answer.status != 200:
        _read_error(answer, body.get("error"))
        return
    choice, usage = body["choices"][0], body["usage"]
    answer.finish, answer.text = choice["finish_reason"] or "", choice["message"]["content"] or ""
    answer.prompt_tokens = usage["prompt_tokens"]
    answer.delivered_tokens = answer.usage_tokens = usage["completion_tokens"]


def _read_error(answer: ClientAttempt, error: Any) -> None:
    fields = error if isinstance(error, dict) else {}
    answer.code = str(fields.get("code") or fields.get("type") or "error")
    number = re.search(r"The (\d+) tokens", str(fields.get("message")))
    if answer.code in SAYS_TOKENS and number:
        answer.usage_tokens = int(number[1])


def take_line(answer: ClientAttempt, line: str, now_s: float) -> bool:
    """Takes one line of a stream; True: it brought tokens."""
    if line == "data: [DONE]":
        answer.is_whole = True
    if not line.startswith("data: {"):
        return False
    chunk = json.loads(line.removeprefix("data: "))
    if "error" in chunk:
        answer.is_whole = True
        _read_error(answer, chunk["error"])
        return False
    if usage := chunk.get("usage"):
        answer.prompt_tokens, answer.usage_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    tokens = 0
    for choice in chunk.get("choices", ()):
        answer.finish = choice.get("finish_reason") or answer.finish
        answer.text += choice["delta"].get("content") or ""
        tokens += len((choice.get("logprobs") or {}).get("content") or ())
    answer.delivered_tokens += tokens
    answer.token_times_s += [now_s] * tokens
    return tokens > 0


async def persist(
    client: LoadHttpClient,
    urls: Sequence[str],
    ask: ClientRequest,
    answers: list[ClientAttempt],
    *,
    first_url: int = 0,
    until_s: float,
    on_token: Callable[[ClientAttempt], None] | None = None,
) -> ClientAttempt:
    """Asks one gateway after the other until `until_s` (monotonic); every attempt goes into `answers`."""
    for attempt in itertools.count():
        answer = await ask_once(client, urls[(first_url + attempt) % len(urls)], ask, on_token)
        answer.attempt = attempt
        answers.append(answer)
        if answer.status == 200 or answer.has_left or not answer.may_retry:
            return answer
        if 400 <= answer.status < 500 and answer.status not in RETRIED:
            return answer
        wait_s = DEFAULT_WAIT_S if answer.retry_after_s is None else answer.retry_after_s
        wait_s = min(wait_s, LONGEST_WAIT_S)
        if time.monotonic() + wait_s > until_s:
            break
        await asyncio.sleep(wait_s)
    return answer


def tokens_per_s(times_s: Sequence[float], first: int) -> float:
    """Slope of tokens over time from token `first` on, by least squares. Raises `ValueError` for none."""
    points = list(enumerate(times_s))[first:]
    if len(points) < 2:
        raise ValueError(f"{len(times_s)} tokens: no slope from token {first} on")
    mean_s = sum(at_s for _, at_s in points) / len(points)
    mean = sum(number for number, _ in points) / len(points)
    spread = sum((at_s - mean_s) ** 2 for _, at_s in points)
    if spread == 0:
        raise ValueError("all tokens came at once")
    return sum((at_s - mean_s) * (number - mean) for number, at_s in points) / spread
