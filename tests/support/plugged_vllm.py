"""A stand-in for a vLLM with Fairgate's plug-in: OpenAI's API and the plug-in's channel, without a model.

The gateway's side inside it is the plug-in's own (`GatewayDesk`, `Channel`), the steps are those of
`tests/support/vllm_plugin.py`: each gives a letter to some sequences, up to their leases.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from engine.vllm_plugin.channel.answer import Channel
from engine.vllm_plugin.channel.desk import GatewayDesk
from engine.vllm_plugin.channel.setup import check_policy
from engine.vllm_plugin.protocol import EXCHANGE_PATH
from tests.support.faulty_servers import Peer, PeerRequest
from tests.support.vllm_plugin import StandInScheduler, StandInSequence

STEP_S = 0.002
PROMPT_TOKENS = 5
KEY = secrets.token_hex(32)


class PluggedVllm:
    """The core and the API server in one, on one event loop."""

    def __init__(self, key: str = KEY, *, slots: int = 8, timeout_s: float = 30.0) -> None:
        self._key, self._slots, self._timeout_s = key.encode(), slots, timeout_s
        self.all: list[StandInSequence] = []
        """All that came."""
        self.bodies: list[dict[str, Any]] = []
        self.has_plugin = True
        self.held_back = 0
        """The last tokens of a stream that are not sent before others follow, as by vLLM's parsers."""
        self.drops = 0
        """So many exchanges more lose their connection."""
        self._core: asyncio.Task[None] | None = None
        self.restart()
        self.peer = Peer(self.serve, owned_by="vllm", context_tokens=4096)

    def restart(self) -> None:
        """Another life: it knows nothing of the one before."""
        desk = GatewayDesk(
            self._key, timeout_s=self._timeout_s, life=secrets.token_hex(8), version="0.0.test",
            wall_clock=time.time, check_policy=check_policy,
        )  # fmt: skip
        self.scheduler = StandInScheduler(desk, now_s=time.monotonic(), slots=self._slots)
        self.channel = Channel(desk, self._key)

    def begin(self) -> None:
        """Computes steps from now on."""
        if self._core is None:
            self._core = self.peer.beside(self._compute())

    @property
    def live(self) -> list[StandInSequence]:
        """Those that have not ended."""
        return list(self.scheduler.live.values())

    def outcomes(self) -> list[str]:
        """Sequences whose outcomes no gateway has acknowledged."""
        return [each for gateway in self.scheduler.desk._gateways for each in gateway.outcomes]

    async def serve(self, request: PeerRequest) -> None:
        """What the peer does with a request."""
        self.begin()
        if request.path == EXCHANGE_PATH and self.drops:
            self.drops -= 1
            request.writer.close()
        elif request.path == EXCHANGE_PATH and self.has_plugin:
            answer = await asyncio.to_thread(self.channel.answer, request.body, is_core_thread=False)
            await request.send(
                f"HTTP/1.1 200 x\r\ncontent-type: application/octet-stream\r\ncontent-length: {len(answer)}"
                "\r\n\r\n".encode(),
                answer,
            )
        elif "completions" in request.path:
            await self._complete(request)
        else:
            await request.json({"detail": "Not Found"}, 404)

    async def _complete(self, request: PeerRequest) -> None:
        body = request.body
        self.bodies.append(body)
        terms = self.scheduler.add(
            body.get("vllm_xargs", {}).get("fairgate"),
            max_tokens=body["max_tokens"],
            name=secrets.token_hex(4),
        )
        sequence_id = terms.submit.sequence_id
        sequence = self.scheduler.live[sequence_id]
        self.all.append(sequence)
        gone = asyncio.create_task(request.until_gone())
        try:
            await self._answer(request, sequence_id, sequence, gone)
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            if self.scheduler.live.get(sequence_id) is sequence:
                self.scheduler.finish(sequence_id, "cancelled")

    async def _answer(
        self, request: PeerRequest, sequence_id: str, sequence: StandInSequence, gone: asyncio.Task[None]
    ) -> None:
        is_streamed = request.body.get("stream", False)
        if is_streamed:
            await request.head()
        sent = 0
        while True:
            is_over = self.scheduler.live.get(sequence_id) is not sequence
            emitted = max(sent, sequence.emitted_tokens - (0 if is_over else self.held_back))
            if is_streamed and (emitted > sent or is_over):
                text = "a" * (emitted - sent)
                await request.events(self._chunk(text, "length" if is_over else None, emitted))
                sent = emitted
            if is_over:
                break
            await asyncio.wait((gone,), timeout=STEP_S)
            if gone.done():
                raise ConnectionError("its client has gone")
        if is_streamed:
            await request.events("[DONE]")
            await request.last()
            return
        message = {"role": "assistant", "content": "a" * sequence.emitted_tokens}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        await request.json({"choices": [choice], "usage": self._usage(sequence.emitted_tokens)})

    def _chunk(self, text: str, finish: str | None, emitted: int) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return {"choices": [choice], "usage": self._usage(emitted)}

    def _usage(self, emitted: int) -> dict[str, int]:
        return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": emitted}

    async def _compute(self) -> None:
        while True:
            scheduler = self.scheduler
            scheduler.run(1, step_s=max(0.0, time.monotonic() - scheduler.now_s))
            await asyncio.sleep(STEP_S)
