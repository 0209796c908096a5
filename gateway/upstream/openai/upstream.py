"""Any server that speaks OpenAI's API as an upstream: vLLM, SGLang, TensorRT-LLM, another Fairgate.

Budgets are exact: the server is asked for no more than could be held, and its output is passed on only as far
as it is covered. Queueing, tiers and fairness end at the dispatch: such a server cannot pause a sequence, so
a stream whose rate is used up is shaped here while the server runs on. Device time is not counted. A
cancelled sequence closes its connection, which makes servers stop.

An answer is asked for as a stream, or whole where it is not read piece by piece and all of it is covered. The
server keeps no outcome: what a dead gateway had running is settled by its last report.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from engine.messages import Delta, Explained, Inventory, ModelInfo, Ready, Snapshot, Submit
from gateway.upstream.base import OnService, UpstreamLost, UpstreamUnavailable, Wording
from gateway.upstream.failover import next_replica, until_begun
from gateway.upstream.http.client import ConnectFailed, HttpClient
from gateway.upstream.http.target import target_of
from gateway.upstream.openai import request as openai_request
from gateway.upstream.openai.classify import CallVerdict
from gateway.upstream.openai.config import OpenAIServer
from gateway.upstream.openai.load_estimate import LoadEstimate, running
from gateway.upstream.openai.monitor import ServerMonitor, now
from gateway.upstream.openai.response_reader import StreamedResponse, WholeResponse
from gateway.upstream.openai.sequence import OpenAISequence
from gateway.upstream.openai.token_count import TokenCount
from tenants.storage.task_stop import stop

SPARE_CONNECTIONS = 16
"""Beyond `max_concurrent`: for requests with many choices, and for probes."""
UNKNOWN_VOCABULARY = 2**31 - 1

log = logging.getLogger("fairgate.gateway.upstream")


class OpenAIUpstream:
    """Implements `Upstream`. Use from one event loop."""

    def __init__(
        self,
        server: OpenAIServer,
        *,
        vocabulary: int | None = None,
        tokenize: Callable[[str], int] | None = None,
    ) -> None:
        """`vocabulary` and `tokenize` are the model's tokenizer, where one is configured. Raises `BadUrl`."""
        self.server = server
        self._tokenize = tokenize
        self._client = HttpClient(
            target_of(server.url),
            max_connections=server.max_concurrent + SPARE_CONNECTIONS,
            api_key=server.api_key,
        )
        self._sequences: dict[str, OpenAISequence] = {}
        self._monitor = ServerMonitor(
            server,
            self._client,
            vocabulary=vocabulary or UNKNOWN_VOCABULARY,
            running=self._sequences.__len__,
            on_change=self._notify,
        )
        self._watchers: list[Callable[[], None]] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._load = LoadEstimate(server.name)
        self._moving: dict[str, _FailoverSequence] = {}
        """What was sent here first, wherever it runs now."""
        self.stand_ins: Sequence[OpenAIUpstream] = ()
        """Other replicas of the model, for sequences that this one does not begin."""
        self.requests = 0
        self.whole_requests = 0
        """Of these, those whose answers were asked for whole."""

    # ------------------------------------------------------------ state

    @property
    def replica_id(self) -> str:
        return self.server.name

    @property
    def is_up(self) -> bool:
        return self._monitor.is_up

    @property
    def ready(self) -> Ready | None:
        return self._monitor.ready

    @property
    def model(self) -> ModelInfo | None:
        return self._monitor.model

    @property
    def failures(self) -> int:
        """Calls that the server did not answer properly."""
        return self._monitor.failures

    @property
    def snapshot(self) -> Snapshot | None:
        """A snapshot as of our own engine, of this gateway's sequences; times as observed."""
        if not self._monitor.is_up:
            return None
        now_s = now()
        if (latest := self._load.latest(now_s)) is not None:
            return latest
        ready = self._monitor.ready
        return None if ready is None else self._load.snapshot(ready, self._sequences.values(), now_s)

    def describe(self) -> dict[str, Any]:
        """For the status page."""
        monitor = self._monitor
        seen = monitor.seen
        return {
            "replica_id": self.replica_id,
            "kind": "openai",
            "url": self.server.url,
            "model": self.server.model,
            "is_up": self.is_up,
            "refusal": monitor.refusal,
            "breaker": monitor.breaker_state.value,
            "retry_in_s": round(monitor.retry_in_s, 3),
            "window": monitor.window(),
            "running": len(self._sequences),
            "held_up": sum(sequence.is_held_up for sequence in self._sequences.values()),
            "connections": self._client.connections,
            "requests": self.requests,
            "whole_requests": self.whole_requests,
            "failures": self.failures,
            "saturation": None
            if seen is None
            else {"running": seen.running, "waiting": seen.waiting, "kv_usage": seen.kv_usage},
        }

    def watch(self, on_change: Callable[[], None]) -> None:
        self._watchers.append(on_change)

    def listen(self, on_service: OnService) -> None:
        """It reports no service by steps."""

    async def start(self) -> None:
        """Probes the server, and begins to do so regularly."""
        await self._monitor.start()

    async def probe(self) -> None:
        """Probes the server now."""
        await self._monitor.probe()

    async def read_metrics(self) -> bool:
        """Reads its Prometheus page now; returns whether that worked."""
        return await self._monitor.read_metrics()

    async def wait_until_up(self, timeout_s: float) -> bool:
        return await self._monitor.wait_until_up(timeout_s)

    async def close(self) -> None:
        """Ends all sequences."""
        await self._monitor.close()
        await stop(self._sending)
        for sequence in list(self._sequences.values()):
            sequence.cancel("cancelled")
        self._client.close()

    # ------------------------------------------------------------ sequences

    def run(self, submit: Submit, wording: Wording) -> AsyncIterator[Delta]:
        sequence_id = submit.sequence_id
        moving = self._moving[sequence_id] = _FailoverSequence(submit, wording, [self])
        try:
            first = self._first(moving)
        except UpstreamUnavailable:
            del self._moving[sequence_id]
            raise
        return until_begun(first, partial(self._move, moving), lambda: self._moving.pop(sequence_id, None))

    def top_up(self, sequence_id: str, lease_tokens: int, lease_gpu_us: int | None) -> None:
        if (moving := self._moving.get(sequence_id)) is not None:
            moving.lease_tokens = max(moving.lease_tokens, lease_tokens)
            if (sequence := moving.at._sequences.get(sequence_id)) is not None:
                sequence.top_up(lease_tokens)

    def cancel(self, sequence_id: str, cause: str) -> None:
        if (moving := self._moving.get(sequence_id)) is not None:
            moving.is_cancelled = True
            if (sequence := moving.at._sequences.get(sequence_id)) is not None:
                sequence.cancel(cause)

    def acknowledge(self, sequence_ids: Sequence[str]) -> None:
        """Does nothing: no outcome is kept."""

    async def set_policy(self, name: str, options: Mapping[str, str | int | float]) -> None:
        """Does nothing: the server has its own."""

    def set_token_budget(self, share: float) -> None:
        """Does nothing: the server has its own."""

    def set_brakes(self, shares: Mapping[int, float]) -> None:
        """Does nothing: what is sent there is bounded at the dispatch."""

    async def explain(self, steps: int = 0) -> Explained:
        raise UpstreamLost("it does not tell its decisions")

    async def collect(self, *, adopt: bool = False) -> Inventory:
        return Inventory(self.replica_id, [running(each) for each in self._sequences.values()], [])

    # ------------------------------------------------------------ attempts

    def _first(self, moving: _FailoverSequence) -> OpenAISequence:
        """The first attempt, on this server or, where it is not available, on another one."""
        try:
            return self._begin(moving.submit, moving.wording)
        except UpstreamUnavailable as error:
            other = self._move(moving, error)
            if other is None:
                raise
            return other

    def _move(self, moving: _FailoverSequence, error: Exception) -> OpenAISequence | None:
        """Another attempt, on any replica."""
        replica = None if moving.is_cancelled else next_replica(moving.tried, self.stand_ins, error)
        if replica is None:
            return None
        log.info("sequence %s goes to %s: %s", moving.submit.sequence_id, replica.replica_id, error)
        moving.tried.append(replica)
        submit = msgspec.structs.replace(moving.submit, lease_tokens=moving.lease_tokens)
        return replica._begin(submit, moving.wording)

    def _begin(self, submit: Submit, wording: Wording) -> OpenAISequence:
        """One attempt, on this server."""
        if not self.is_up:
            raise UpstreamUnavailable(
                self._monitor.refusal or "it failed too often; it is tried again shortly"
            )
        server = self.server
        most_tokens = submit.max_tokens
        if wording.most_tokens is not None:
            most_tokens = max(1, min(most_tokens, wording.most_tokens()))
        is_whole = not wording.is_streamed and most_tokens <= min(server.whole_tokens, submit.lease_tokens)
        count = TokenCount(most_tokens, self._tokenize)
        timeouts = server.timeouts
        sequence = OpenAISequence(
            submit,
            most_tokens,
            WholeResponse(count) if is_whole else StreamedResponse(count),
            replica_id=self.replica_id,
            timeouts=timeouts,
            first_byte_s=timeouts.whole_s(most_tokens) if is_whole else timeouts.first_byte_s,
            is_prompt_counted=self._tokenize is not None,
            on_verdict=_Call(self._monitor).verdict,
            on_over=partial(self._over, submit.sequence_id),
        )
        self._sequences[submit.sequence_id] = sequence
        self.requests += 1
        self.whole_requests += is_whole
        body = openai_request.body(
            submit,
            wording,
            model=server.model,
            max_tokens=most_tokens,
            priority=server.priority,
            usage=server.usage,
            stream=not is_whole,
        )
        request = self._client.request("POST", openai_request.path(wording), body)
        connection = self._client.send_now(request, sequence)
        if connection is not None:
            sequence.connected(connection)
        else:
            task = asyncio.create_task(self._send(sequence, request))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        return sequence

    async def _send(self, sequence: OpenAISequence, request: bytes) -> None:
        try:
            connection = await self._client.send(request, sequence, self.server.timeouts.connect_s)
        except ConnectFailed as error:
            sequence.not_connected(str(error))
        else:
            sequence.connected(connection)

    def _over(self, sequence_id: str) -> None:
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self._load.learn(sequence, len(self._sequences))

    def _notify(self) -> None:
        for watcher in self._watchers:
            watcher()


@dataclass(slots=True)
class _FailoverSequence:
    """A sequence and the replicas that it was sent to."""

    submit: Submit
    wording: Wording
    tried: list[OpenAIUpstream]
    lease_tokens: int = 0
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        self.lease_tokens = self.submit.lease_tokens

    @property
    def at(self) -> OpenAIUpstream:
        """Where it is now."""
        return self.tried[-1]


class _Call:
    """One call, and the monitor's epoch for its end."""

    __slots__ = ("_epoch", "_monitor")

    def __init__(self, monitor: ServerMonitor) -> None:
        self._monitor = monitor
        self._epoch = monitor.begin()

    def verdict(self, verdict: CallVerdict, reason: str) -> None:
        self._epoch = self._monitor.verdict(self._epoch, verdict, reason)
