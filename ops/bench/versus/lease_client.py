"""Signed requests to a vLLM server with our plug-in, and a gateway's end of its channel, for benchmarks."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from engine.vllm_plugin.protocol import EXCHANGE_PATH, ContractClaims, Exchange, PluginReport, SequenceNews
from engine.vllm_plugin.signature import decode_report, encode_exchange, sign
from ops.bench.common.errors import CannotBench
from ops.bench.versus.vllm_server import MODEL

POLL_S = 0.02
WAIT_S = 120.0
REQUEST_TIMEOUT_S = 300.0


@dataclass
class StreamedAnswer:
    text: str = ""
    tokens: int = 0
    """Output tokens, by the server's running count."""
    finish: str | None = None


@dataclass
class LeaseClient:
    """One gateway, and the clients of its requests."""

    http: httpx.AsyncClient
    """Of the server, without `/v1`."""
    key: bytes
    gateway_id: str = "bench"
    session: str = field(default_factory=lambda: secrets.token_hex(8))

    def signed(self, sequence_id: str, lease_tokens: int, *, key: bytes | None = None, **fields: Any) -> str:
        """Claims of a request; `fields` as in `ContractClaims`."""
        given: dict[str, Any] = {"tenant_id": "acme", "issued_at_s": time.time()} | fields
        claims = ContractClaims(
            gateway_id=self.gateway_id,
            request_id=sequence_id,
            sequence_id=sequence_id,
            lease_tokens=lease_tokens,
            session=self.session,
            **given,
        )
        return sign(claims, key or self.key)

    async def stream(
        self, prompt: str, max_tokens: int, signature: str | None = None, into: StreamedAnswer | None = None
    ) -> StreamedAnswer:
        """A completion, greedy and to its end; `into` is filled meanwhile."""
        answer = into or StreamedAnswer()
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if signature is not None:
            body["vllm_xargs"] = {"fairgate": signature}
        async with self.http.stream(
            "POST", "/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S
        ) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")[:400]
                raise CannotBench(f"the server answers {response.status_code}: {text}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                answer.tokens = (chunk.get("usage") or {}).get("completion_tokens", answer.tokens)
                for choice in chunk["choices"]:
                    answer.text += choice["text"]
                    answer.finish = choice["finish_reason"] or answer.finish
        return answer

    async def exchange(self, **fields: Any) -> PluginReport:
        """One exchange over vLLM's HTTP. Raises `ChannelRefused`."""
        said = Exchange(
            gateway_id=self.gateway_id,
            nonce=secrets.token_hex(16),
            issued_at_s=time.time(),
            session=self.session,
            **fields,
        )
        response = await self.http.post(EXCHANGE_PATH, content=encode_exchange(said, self.key))
        return decode_report(response.content, self.key, said.nonce)

    async def until(
        self, is_so: Callable[[dict[str, SequenceNews]], bool], what: str
    ) -> dict[str, SequenceNews]:
        """Asks until the news of all its sequences are as awaited. Raises `CannotBench`."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            news = (await self.exchange()).sequences
            if is_so(news):
                return news
            if time.monotonic() > deadline_s:
                states = {name: (each.state, each.emitted_tokens) for name, each in list(news.items())[:8]}
                raise CannotBench(f"after {WAIT_S:g} s it is not so that {what}: {states}")
            await asyncio.sleep(POLL_S)
