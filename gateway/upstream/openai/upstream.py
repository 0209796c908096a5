"""Any server that speaks OpenAI's API as an upstream: vLLM, SGLang, TensorRT-LLM, another Fairgate.

Budgets are exact: no more is asked for than could be held, and output is passed on only as covered. A vLLM
with our plug-in (`vllm_plugin/`) is as our own engine: it stops at leases, shares steps by weight, reports
service and keeps outcomes. With others fairness ends at the dispatch: a stream over its rate is shaped here
while the server runs on. Device time is not counted. Cancelling closes the connection.

Answers come as a stream, or whole if fully covered and not read piece by piece. A dead gateway's sequences
are settled by its last report.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from engine.messages import (
    Delta,
    EngineKnobs,
    Explained,
    Inventory,
    Ready,
    RunningSequence,
    Snapshot,
    Submit,
)
from engine.vllm_plugin.protocol import PolicyChoice
from gateway.fair_threads import FairThreads
from gateway.upstream.base import CapabilityLost, OnService, UpstreamFailed, UpstreamUnavailable, Wording
from gateway.upstream.capabilities import Capabilities
from gateway.upstream.http.client import HttpClient, HttpFailed
from gateway.upstream.http.target import target_of
from gateway.upstream.openai.capability_probe import described
from gateway.upstream.openai.config import OpenAIServer
from gateway.upstream.openai.failover_sequence import FailoverSequence
from gateway.upstream.openai.load_estimate import running
from gateway.upstream.openai.monitor import ServerMonitor, now
from gateway.upstream.openai.outcome import of_refusal
from gateway.upstream.openai.request import PriorityStyle, encode
from gateway.upstream.openai.sequence import OpenAISequence
from gateway.upstream.openai.server_sequences import ServerSequences
from gateway.upstream.vllm_plugin.link import PluginLink
from gateway.upstream.vllm_plugin.server_link import ServerLink
from gateway.upstream.vllm_plugin.transport import transport_of

MOST_ASKED = 4
"""Of `SPARE_CONNECTIONS`, for questions beside sequences."""
SPARE_CONNECTIONS = 16
"""Beyond `max_concurrent`: for requests with many choices, and for probes."""
UNKNOWN_VOCABULARY = 2**31 - 1


class OpenAIUpstream:
    """Implements `Upstream`. Use from one event loop."""

    def __init__(
        self,
        server: OpenAIServer,
        *,
        vocabulary: int | None = None,
        tokenize: Callable[[str], int] | None = None,
        cache_secret: bytes | None = None,
        threads: FairThreads | None = None,
        gateway_id: str = "",
    ) -> None:
        """`vocabulary`, `tokenize`: the configured tokenizer, run in `threads` (None: own ones).
        `cache_secret` makes cache salts, equal in all gateways; None: random. Raises `BadUrl`."""
        self.server = server
        self.replica_id = self.name = server.name
        self.address = server.url
        self.is_drained = False
        self.stand_ins: Sequence[OpenAIUpstream] = ()
        """Other replicas of the model, for sequences that this one does not begin."""
        self._watchers: list[Callable[[], None]] = []
        self._moving: dict[str, FailoverSequence] = {}
        """What was sent here first, wherever it runs now."""
        self._running: dict[str, OpenAISequence] = {}
        target = target_of(server.url)
        connections = server.max_concurrent + SPARE_CONNECTIONS
        self._client = HttpClient(target, max_connections=connections, api_key=server.api_key)
        self._asked = asyncio.Semaphore(MOST_ASKED)
        self.monitor = ServerMonitor(
            server,
            self._client,
            vocabulary=vocabulary or UNKNOWN_VOCABULARY,
            running=self._running.__len__,
            has_stand_in=lambda: any(replica.is_up for replica in self.stand_ins),
            on_change=self._notify,
        )
        self.link = ServerLink(server.name)
        """To its plug-in, if it has ours."""
        if server.priority is PriorityStyle.FAIRGATE:
            transport = transport_of(server.plugin_socket, target, server.api_key)
            self.link = PluginLink(
                server.name, gateway_id, server.plugin_key, transport, on_change=self._notify
            )
        self._sequences = ServerSequences(
            server,
            self._client,
            self.monitor,
            self.link,
            self._running,
            tokenize=tokenize,
            cache_secret=cache_secret,
            threads=threads,
            on_change=self._notify,
        )

    # ------------------------------------------------------------ state

    @property
    def is_up(self) -> bool:
        return self.monitor.is_up and self.link.is_up

    @property
    def ready(self) -> Ready | None:
        ready = self.monitor.ready
        return None if ready is None else self.link.ready(ready)

    @property
    def capabilities(self) -> Capabilities:
        return self._sequences.capabilities

    @property
    def running_requests(self) -> int:
        """Requests of this gateway with a sequence here, also such as were sent to another replica first."""
        return len({sequence.submit.request_id for sequence in self._running.values()})

    @property
    def snapshot(self) -> Snapshot | None:
        """A snapshot as of our own engine, of this gateway's sequences; times as observed."""
        ready = self.monitor.ready
        if not self.is_up or ready is None:
            return None
        return self._sequences.load.snapshot(ready, self._running.values(), now())

    def describe(self) -> dict[str, Any]:
        monitor, sequences = self.monitor, self._sequences
        seen = monitor.seen
        return {
            "replica_id": self.replica_id,
            "kind": "openai",
            "url": self.server.url,
            "model": self.server.model,
            "is_up": self.is_up,
            "is_drained": self.is_drained,
            "refusal": self._refusal,
            "refusal_code": self.link.refusal_code,
            "breaker": monitor.breaker.state(now()).value,
            "retry_in_s": round(monitor.breaker.retry_in_s(now()), 3),
            "window": monitor.window(),
            "running": len(self._running),
            "held_up": sum(sequence.is_held_up for sequence in self._running.values()),
            "connections": self._client.connections,
            "requests": sequences.requests,
            "whole_requests": sequences.whole_requests,
            "failures": monitor.failures,
            "contradictions": monitor.contradictions,
            "prefix_cache": monitor.prefix_cache.value,
            **described(monitor.trials),
            "capabilities": sorted(self.capabilities.words),
            "tells_usage": not sequences.without_usage,
            "saturation": None
            if seen is None
            else {"running": seen.running, "waiting": seen.waiting, "kv_usage": seen.kv_usage},
            "plugin": self.link.describe(),
        }

    def watch(self, on_change: Callable[[], None]) -> None:
        self._watchers.append(on_change)

    def listen(self, on_service: OnService) -> None:
        self.link.on_service = on_service

    async def start(self) -> None:
        await self.monitor.start()
        await self.link.start()

    async def probe(self) -> None:
        await self.monitor.probe()
        await self.link.probe()

    async def wait_until_up(self, timeout_s: float) -> bool:
        return await self.monitor.wait_until_up(timeout_s)

    async def close(self) -> None:
        await self.monitor.close()
        await self._sequences.close()
        await self.link.close()
        self._client.close()

    async def ask(self, path: str, fields: Mapping[str, Any]) -> bytes:
        """The answer to a question beside sequences, a few at a time; its health is not judged by it. Raises
        `CapabilityLost` without such a path, `SequenceRefused`, `UpstreamFailed`."""
        timeout_s = self.server.probe_s
        body = encode({**fields, "model": self.server.model})
        try:
            async with asyncio.timeout(timeout_s), self._asked:
                status, answer = await self._client.post(path, body, timeout_s)
        except (TimeoutError, HttpFailed) as error:
            raise UpstreamFailed(f"it does not answer {path}: {error}") from None
        if status == 200:
            return answer
        if status in (404, 405, 501):
            raise CapabilityLost(path)
        raise of_refusal(status, answer, self.server.api_key)[1]

    # ------------------------------------------------------------ sequences

    def run(self, submit: Submit, wording: Wording) -> AsyncIterator[Delta]:
        sequence_id = submit.sequence_id
        moving = self._moving[sequence_id] = FailoverSequence(submit, wording, self, self.stand_ins)
        return moving.deltas(partial(self._moving.pop, sequence_id, None))

    def begin(self, submit: Submit, wording: Wording) -> OpenAISequence:
        """One attempt, on this server."""
        if not self.is_up:
            raise UpstreamUnavailable(self._refusal or "it is tried again shortly")
        if (lacking := self.capabilities.lacks(wording.needs)) is not None:
            raise CapabilityLost(lacking)
        return self._sequences.begin(submit, wording)

    def top_up(self, sequence_id: str, lease_tokens: int, lease_gpu_us: int | None) -> None:
        if (moving := self._moving.get(sequence_id)) is not None:
            moving.top_up(lease_tokens)

    def cancel(self, sequence_id: str, cause: str) -> None:
        if (moving := self._moving.get(sequence_id)) is not None:
            moving.cancel(cause)
        else:
            self.link.cancel(sequence_id, cause)  # of an earlier life

    def acknowledge(self, sequence_ids: Sequence[str], *, is_traced: bool = False) -> None:
        """Where there is no plug-in no outcome is kept. A sequence may have moved to another replica."""
        for replica in (self, *self.stand_ins):
            replica.link.acknowledge(sequence_ids)

    async def set_policy(self, name: str, options: Mapping[str, str | int | float]) -> None:
        """Of its plug-in; without one the server has a policy of its own."""
        await self.link.set_policy(PolicyChoice(name, dict(options)))

    def set_knobs(self, knobs: EngineKnobs) -> None:
        """Of its plug-in only, which has no token budget of its own."""
        self.link.set_knobs(knobs)

    def set_brakes(self, shares: Mapping[int, float]) -> None:
        """Does nothing: what is sent there is bounded at the dispatch."""

    def set_drained(self, is_drained: bool) -> None:
        if is_drained != self.is_drained:
            self.is_drained = is_drained
            self._notify()

    async def explain(self, steps: int = 0) -> Explained:
        return self.link.explain()

    async def collect(self, *, adopt: bool = False) -> Inventory:
        def own() -> list[RunningSequence]:
            return [running(sequence) for sequence in self._running.values()]

        return await self.link.collect(own, adopt=adopt)

    @property
    def _refusal(self) -> str:
        return self.monitor.refusal or self.monitor.silence or self.link.refusal

    def _notify(self) -> None:
        for watcher in self._watchers:
            watcher()
